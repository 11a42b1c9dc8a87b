"""Assembles a stage module: the user's own modules, and a forward generated from the code between them."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import fx, nn


class StageModule(nn.Module):
    """What a stage has of a model. Unlike ``fx.GraphModule`` it leaves all names to the model."""


def assembled(model: nn.Module, graph: fx.Graph, index: int) -> nn.Module:
    """Stage ``index`` of ``model``: runs ``graph`` with the modules, parameters and buffers that it names."""
    code = Code(graph)
    exec(compile(code.text, f"<stage {index}>", "exec"), code.known)
    module: nn.Module = type(f"Stage{index}", (StageModule,), {"forward": code.known["forward"]})()
    module.training = model.training

    # what is around comes before what is inside
    for path in sorted(_named(graph), key=lambda p: p.count(".")):
        _hang(model, module, path)
    return module


def _named(graph: fx.Graph) -> list[str]:
    """What it names of the model, in the graph's order: ranks gather modules in the order they hang in."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")))


def _hang(model: nn.Module, stage: nn.Module, path: str) -> None:
    """Give ``stage`` what ``model`` has at ``path``, below bare modules where it lacks those around it."""
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
    """``graph`` as the ``text`` of a function ``forward``, whose functions and constants are in ``known``.

    fx would write the names of the model into it, where ``self``, ``in`` or two spellings of one letter mean
    something else. Here every name is ours, and what is the model's is a string.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[str, Any] = {}
        self._names = {node: f"v{n}" for n, node in enumerate(graph.nodes)}
        given = [self._names[n] for n in graph.nodes if n.op == "placeholder"]
        done = _done(graph)
        lines = [self._line(n, done[n]) for n in graph.nodes if n.op != "placeholder"]
        self.text = f"def forward({', '.join(['stage', *given])}):\n    " + "\n    ".join(lines) + "\n"

    def _line(self, node: fx.Node, done: list[fx.Node]) -> str:
        """One call, and the names that nobody needs any more let go of their tensors."""
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
        """An argument; lists and dicts are new ones in each call."""
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
        """What ``value`` itself goes by: a function, or a constant."""
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name


def _reached(path: str) -> str:
    return reduce(lambda outer, name: f"getattr({outer}, {name!r})", path.split("."), "stage")


def _done(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What nobody needs any more after each node; all that is left goes when the function returns."""
    out: dict[fx.Node, list[fx.Node]] = {n: [] for n in graph.nodes}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        mine = list(dict.fromkeys(n for n in (node, *node.all_input_nodes) if n not in seen))
        seen.update(mine)
        out[node] += mine
    return out
