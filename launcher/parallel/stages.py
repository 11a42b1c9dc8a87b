"""Stage modules, made of the user's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from launcher.parallel.dispatch.containers import here
from launcher.parallel.half_precision import with_cast_weights
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.sequence_chunks import Carry, attach
from launcher.parallel.trace.code_between_modules import Tracer, call_text, follow
from launcher.parallel.trace.graph_recorder import UnderModes
from launcher.parallel.trace.tensor_specs import meta
from launcher.plan.cut.stages import BoundaryTensor, Stage, inverse
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.tensor_spec import TensorSpec


class StageModule(nn.Module):
    """A stage of a model. Unlike ``fx.GraphModule`` it leaves all names to the model."""


def assembled(model: nn.Module, graph: fx.Graph, index: int) -> nn.Module:
    """Returns stage ``index`` of ``model``, which runs ``graph`` on the modules and tensors that it names."""
    code = Code(graph)
    exec(compile(code.text, f"<stage {index}>", "exec"), code.known)
    module: nn.Module = type(f"Stage{index}", (StageModule,), {"forward": code.known["forward"]})()
    module.training = model.training

    # outer modules before inner ones
    for path in sorted(_named(graph), key=lambda p: p.count(".")):
        _register(model, module, path)
    return module


def _named(graph: fx.Graph) -> list[str]:
    """Returns the model's names in the graph's order: ranks gather modules in the order of registration."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")))


def _register(model: nn.Module, stage: nn.Module, path: str) -> None:
    """Registers the attribute of ``model`` at ``path`` in ``stage``; creates missing outer modules, empty."""
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
        parameters = [self._names[n] for n in graph.nodes if n.op == "placeholder"]
        done = _done(graph)
        lines = [self._line(n, done[n]) for n in graph.nodes if n.op != "placeholder"]
        self.text = f"def forward({', '.join(['stage', *parameters])}):\n    " + "\n    ".join(lines) + "\n"

    def _line(self, node: fx.Node, done: list[fx.Node]) -> str:
        """Returns one call, after which names that are no longer needed drop their tensors."""
        if node.op == "output":
            return f"return {self._argument_text(node.args[0])}"
        freed = "".join(f"{self._names[n]} = " for n in done)
        line = f"{self._names[node]} = {self._call(node)}"
        return f"{line}; {freed}None" if freed else line

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return _reached(str(node.target))
        args = [self._argument_text(a) for a in node.args]
        if node.kwargs:
            args.append(
                "**{" + ", ".join(f"{k!r}: {self._argument_text(v)}" for k, v in node.kwargs.items()) + "}"
            )
        assert node.op in ("call_module", "call_function"), node.op
        func = _reached(str(node.target)) if node.op == "call_module" else self._name(node.target)
        return f"{func}({', '.join(args)})"

    def _argument_text(self, a: Any) -> str:
        """Returns the text of an argument; lists and dicts are new in each call."""
        if isinstance(a, fx.Node):
            return self._names[a]
        if isinstance(a, tuple):
            return "(" + "".join(f"{self._argument_text(v)}, " for v in a) + ")"
        if isinstance(a, list):
            return "[" + ", ".join(map(self._argument_text, a)) + "]"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument_text(v)}" for k, v in a.items()) + "}"
        if isinstance(a, slice):
            return f"{self._name(slice)}({', '.join(map(self._argument_text, (a.start, a.stop, a.step)))})"
        return self._name(a)

    def _name(self, value: Any) -> str:
        """Returns a name for ``value``: a function, or a constant."""
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name


def _reached(path: str) -> str:
    return reduce(lambda outer, name: f"getattr({outer}, {name!r})", path.split("."), "stage")


def _done(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Returns for each node the nodes whose last use it is."""
    out: dict[fx.Node, list[fx.Node]] = {n: [] for n in graph.nodes}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        mine = list(dict.fromkeys(n for n in (node, *node.all_input_nodes) if n not in seen))
        seen.update(mine)
        out[node] += mine
    return out


CPU = torch.device("cpu")


@dataclass(frozen=True)
class StagePart:
    """One virtual stage on this rank: ``module`` runs it, ``stage`` describes it.

    ``carry`` tells its modules which piece runs, if sequences are cut. ``code`` has the calls of all stages,
    one per line.
    """

    stage: Stage
    module: nn.Module
    carry: Carry | None = None
    code: tuple[str, ...] = ()

    def named(self, placed: tuple[Placed, ...]) -> list[tuple[Placed, str, torch.Tensor]]:
        """Returns each tensor of the plan in this part once, with its name here."""
        mine = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        out = []
        for p in placed:
            name = next((n for n in p.names if n in mine), None)
            if name is not None and self.stage.index in p.stages:
                out.append((p, name, mine[name]))
        return out


def traced(model: nn.Module, plan: Plan, inputs: tuple[TensorSpec, ...]) -> Tracer | None:
    """Traces ``model`` (on the meta device) for ``split``; ``None`` if it is not split."""
    if plan.leaves is None:
        return None
    running = with_cast_weights(model, plan.dtypes.compute) if plan.dtypes.mixed else model
    with put_back(files_of(model)):
        return follow(running, frozenset(plan.leaves), meta(inputs))


def split(
    model: nn.Module, plan: Plan, pp: int, tracer: Tracer | None, device: torch.device = CPU
) -> list[StagePart]:
    """Returns the stage modules of pipeline rank ``pp``, made of the modules of ``model`` itself (on meta).

    ``tracer`` has traced its forward; ``device`` is the device that code between the modules sees.
    """
    stages = plan.stages_of(pp)
    if tracer is None:
        return [StagePart(stages[0], model)]

    code = tuple(map(call_text, tracer.graph.nodes))
    parts = []
    for stage in stages:
        module = assembled(model, stage_graph(tracer, stage, plan, device), stage.index)
        carry = Carry(plan.pieces) if plan.pieces else None
        if carry is not None:
            attach(module, carry)
        parts.append(StagePart(stage, module, carry, code))

    _separate(parts, plan)
    return parts


def stage_graph(tracer: Tracer, stage: Stage, plan: Plan, device: torch.device = CPU) -> fx.Graph:
    """Returns the graph of ``stage``: it takes what the stage receives, and returns what it sends, flat."""
    by_name = {n.name: n for n in tracer.graph.nodes}
    out = fx.Graph()
    env: dict[fx.Node, Any] = {}

    # inputs; their nodes are made first, so that no other node takes their names
    overwritten = tracer.overwritten()
    crossings = plan.boundaries[stage.index - 1] if stage.index else ()
    count = sum(len(c.specs) for c in crossings)
    received = iter([out.placeholder(f"given_{n}") for n in range(count)])
    for c in crossings:
        flat = list(islice(received, len(c.specs)))
        if by_name[c.name] in overwritten:  # autograd allows no in-place change of a received tensor
            flat = [out.call_function(torch.clone, (x,)) for x in flat]
        flat = [_permuted(out, x, inverse(dims)) for x, dims in zip(flat, c.orders, strict=True)]
        env[by_name[c.name]] = tuple(flat) if c.packed else flat[0]

    # the stage's own nodes
    for node in (by_name[n] for n in stage.nodes):
        if node.target is here:
            env[node] = device
        elif node.op != "output":
            env[node] = _copied(out, node, tracer, env, device)

    # outputs
    if stage.index == len(plan.stages) - 1:
        out.output(fx.node.map_arg(by_name[stage.nodes[-1]].args[0], lambda n: env[n]))
        return out
    sent: list[fx.Node] = []
    for c in plan.boundaries[stage.index]:
        sent += _send(out, env[by_name[c.name]], c)
    out.output(tuple(sent))
    return out


def unsplit(model: nn.Module, tracer: Tracer, device: torch.device = CPU) -> nn.Module:
    """Returns one module that runs the traced forward of ``model``."""
    out, env = fx.Graph(), dict[fx.Node, Any]()
    for node in tracer.graph.nodes:
        env[node] = device if node.target is here else _copied(out, node, tracer, env, device)
    return assembled(model, out, 0)


def _copied(
    out: fx.Graph, node: fx.Node, tracer: Tracer, env: dict[fx.Node, Any], device: torch.device
) -> fx.Node:
    """Copies ``node`` with its inputs in ``env``, under the modes in which it ran."""
    modes = tracer.modes.get(node)
    if modes is None:
        return out.node_copy(node, lambda n: env[n])
    modes = modes.on(device)
    args: Any = fx.node.map_arg(node.args, lambda n: env[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n])
    if node.op != "call_module":
        assert callable(node.target)
        return out.call_function(UnderModes(node.target, modes), args, kwargs)
    module = out.get_attr(str(node.target))
    return out.call_function(UnderModes(call, modes), (module, *args), kwargs)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, as a function."""
    return module(*args, **kwargs)


def _send(out: fx.Graph, value: Any, c: BoundaryTensor) -> list[fx.Node]:
    """Returns the nodes that send ``value``, one per tensor."""
    if not c.packed:
        flat = [value]
    elif isinstance(value, tuple):
        flat = list(value)
    else:
        flat = [out.call_function(getitem, (value, i)) for i in range(len(c.specs))]
    flat = [_permuted(out, x, dims) for x, dims in zip(flat, c.orders, strict=True)]
    return [out.call_function(boundary, (x, c.trains and i not in c.idle)) for i, x in enumerate(flat)]


def _permuted(out: fx.Graph, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
    return out.call_function(torch.permute, (x, dims)) if dims else x


def boundary(t: torch.Tensor, trains: bool) -> torch.Tensor:
    """Returns ``t`` ready to send: contiguous, no view, and in the autograd graph if it gets a gradient.

    While torch compiles, every tensor is cloned, because the compiler cannot tell which of them are views.
    """
    if not trains:
        return t.detach().clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling() or t._is_view() or not t.is_contiguous() or t.is_leaf:
        t = t.clone(memory_format=torch.contiguous_format)
    return t


def _separate(parts: list[StagePart], plan: Plan) -> None:
    """Gives each stage its own copy of a sharded tensor that two stages of a rank share.

    ``tie`` keeps them equal.
    """
    sharded = {n for p in plan.params if p.sharded for n in p.names}
    taken: set[int] = set()
    for part in parts:
        swap: dict[int, nn.Parameter] = {}
        for path, module in part.module.named_modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) in taken and f"{path}.{name}".lstrip(".") in sharded:
                    swap.setdefault(id(p), nn.Parameter(torch.empty_like(p), p.requires_grad))
                    module._parameters[name] = swap[id(p)]
        taken |= {id(p) for p in part.module.parameters()}


def flatten(parts: Sequence[StagePart], plan: Plan) -> None:
    """Registers a hook on the last stage, which returns its tensors in the order of ``plan.output_keys``."""
    if not plan.output_keys:
        return

    def flat(module: nn.Module, args: Any, output: Any) -> tuple[Tensor, ...]:
        return tuple(output[key] for key in plan.output_keys)

    for part in parts:
        if part.stage.index == len(plan.stages) - 1:
            part.module.register_forward_hook(flat)
