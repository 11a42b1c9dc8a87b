"""Assembles a stage module: the user's own modules, and a forward generated from the code between them."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import fx, nn


class StageModule(nn.Module):
    """A stage of a model. Unlike ``fx.GraphModule`` it leaves all names to the model."""


def assembled(model: nn.Module, graph: fx.Graph, index: int) -> nn.Module:
    """Return stage ``index`` of ``model``, which runs ``graph`` on the modules and tensors that it names."""
    code = Code(graph)
    exec(compile(code.text, f"<stage {index}>", "exec"), code.known)
    module: nn.Module = type(f"Stage{index}", (StageModule,), {"forward": code.known["forward"]})()
    module.training = model.training

    # outer modules before inner ones
    for path in sorted(_named(graph), key=lambda p: p.count(".")):
        _hang(model, module, path)
    return module


def _named(graph: fx.Graph) -> list[str]:
    """Return the model's names in the graph's order: ranks gather modules in the order of registration."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")))


def _hang(model: nn.Module, stage: nn.Module, path: str) -> None:
    """Give ``stage`` the attribute of ``model`` at ``path``, in empty modules if it lacks the outer ones."""
    *around, name = path.split(".")
    for part in around:
        if not hasattr(stage, part):
            stage.add_module(part, nn.Module())
        model, stage = getattr(model, part), getattr(stage, part)
    if hasattr(stage, name):
        return
    value = getattr(model, name)
    if name in model._buffers:
        stage.register_buffer(name, value, persistent=name not in model._non_persistent_buffers_set)
    else:
        setattr(stage, name, value)


class Code:
    """The ``text`` of a function ``forward`` for ``graph``; ``known`` has its functions and constants.

    fx would write the model's names into the code, where ``self``, ``in`` or two spellings of one letter mean
    something else. Here every identifier is generated, and the model's names are strings.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[str, Any] = {}
        self._names = {node: f"v{n}" for n, node in enumerate(graph.nodes)}
        given = [self._names[n] for n in graph.nodes if n.op == "placeholder"]
        done = _done(graph)
        lines = [self._line(n, done[n]) for n in graph.nodes if n.op != "placeholder"]
        self.text = f"def forward({', '.join(['stage', *given])}):\n    " + "\n    ".join(lines) + "\n"

    def _line(self, node: fx.Node, done: list[fx.Node]) -> str:
        """Return one call, after which names that are no longer needed drop their tensors."""
        if node.op == "output":
            return f"return {self._said(node.args[0])}"
        freed = "".join(f"{self._names[n]} = " for n in done)
        line = f"{self._names[node]} = {self._call(node)}"
        return f"{line}; {freed}None" if freed else line

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return _reached(str(node.target))
        args = [self._said(a) for a in node.args]
        if node.kwargs:
            args.append("**{" + ", ".join(f"{k!r}: {self._said(v)}" for k, v in node.kwargs.items()) + "}")
        assert node.op in ("call_module", "call_function"), node.op
        func = _reached(str(node.target)) if node.op == "call_module" else self._name(node.target)
        return f"{func}({', '.join(args)})"

    def _said(self, a: Any) -> str:
        """Return the text of an argument; lists and dicts are new in each call."""
        if isinstance(a, fx.Node):
            return self._names[a]
        if isinstance(a, tuple):
            return "(" + "".join(f"{self._said(v)}, " for v in a) + ")"
        if isinstance(a, list):
            return "[" + ", ".join(map(self._said, a)) + "]"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self._said(v)}" for k, v in a.items()) + "}"
        if isinstance(a, slice):
            return f"{self._name(slice)}({', '.join(map(self._said, (a.start, a.stop, a.step)))})"
        return self._name(a)

    def _name(self, value: Any) -> str:
        """Return a name for ``value``: a function, or a constant."""
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name


def _reached(path: str) -> str:
    return reduce(lambda outer, name: f"getattr({outer}, {name!r})", path.split("."), "stage")


def _done(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes that are not needed after each node; the rest is freed when the function returns."""
    out: dict[fx.Node, list[fx.Node]] = {n: [] for n in graph.nodes}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        mine = list(dict.fromkeys(n for n in (node, *node.all_input_nodes) if n not in seen))
        seen.update(mine)
        out[node] += mine
    return out
