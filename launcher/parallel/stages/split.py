"""Splits a model into stage modules by the plan, out of the user's own modules under their own names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from launcher.parallel.dispatch.containers import here
from launcher.parallel.model_state.module_globals import files, put_back
from launcher.parallel.sequence.carry import Carry, attach
from launcher.parallel.stages.half_model import narrowed
from launcher.parallel.stages.stage_module import assembled
from launcher.parallel.trace.ambient_modes import UnderModes
from launcher.parallel.trace.fx_glue import Tracer, follow, said
from launcher.parallel.trace.model_facts import meta
from launcher.plan.partition.params import Placed
from launcher.plan.partition.stages import Crossing, Stage
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec

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
        """Return each tensor of the plan in this part once, with its name here."""
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
    """Trace ``model`` (on the meta device) for ``split``; ``None`` if it is not split."""
    if plan.leaves is None:
        return None
    running = narrowed(model, plan.dtypes.compute) if plan.dtypes.mixed else model
    with put_back(files(*map(type, model.modules()))):
        return follow(running, frozenset(plan.leaves), meta(inputs))


def split(
    model: nn.Module, plan: Plan, pp: int, tracer: Tracer | None, device: torch.device = CPU
) -> list[StagePart]:
    """Return the stage modules of pipeline rank ``pp``, made of the modules of ``model`` itself (on meta).

    ``tracer`` has traced its forward; ``device`` is the device that code between the modules sees.
    """
    held = plan.held(pp)
    if tracer is None:
        return [StagePart(held[0], model)]

    code = tuple(map(said, tracer.graph.nodes))
    parts = []
    for stage in held:
        module = assembled(model, stage_graph(tracer, stage, plan, device), stage.index)
        carry = Carry(plan.pieces) if plan.pieces else None
        if carry is not None:
            attach(module, carry)
        parts.append(StagePart(stage, module, carry, code))

    _separate(parts, plan)
    return parts


def stage_graph(tracer: Tracer, stage: Stage, plan: Plan, device: torch.device = CPU) -> fx.Graph:
    """Return the graph of ``stage``: it takes what the stage receives and returns what it sends, all flat."""
    whole = {n.name: n for n in tracer.graph.nodes}
    out = fx.Graph()
    env: dict[fx.Node, Any] = {}

    # inputs; their nodes come before others could take their names
    overwritten = tracer.overwritten()
    crossings = plan.boundaries[stage.index - 1] if stage.index else ()
    count = sum(len(c.specs) for c in crossings)
    given = iter([out.placeholder(f"given_{n}") for n in range(count)])
    for c in crossings:
        flat = list(islice(given, len(c.specs)))
        if whole[c.name] in overwritten:  # autograd allows no in-place change of a received tensor
            flat = [out.call_function(torch.clone, (x,)) for x in flat]
        env[whole[c.name]] = tuple(flat) if c.packed else flat[0]

    # the stage's own nodes
    for node in (whole[n] for n in stage.nodes):
        if node.target is here:
            env[node] = device
        elif node.op != "output":
            env[node] = _copied(out, node, tracer, env)

    # outputs
    if stage.index == len(plan.stages) - 1:
        out.output(fx.node.map_arg(whole[stage.nodes[-1]].args[0], lambda n: env[n]))
        return out
    sent: list[fx.Node] = []
    for c in plan.boundaries[stage.index]:
        sent += _send(out, env[whole[c.name]], c)
    out.output(tuple(sent))
    return out


def _copied(out: fx.Graph, node: fx.Node, tracer: Tracer, env: dict[fx.Node, Any]) -> fx.Node:
    """Copy ``node`` with its inputs in ``env``, under the modes in which it ran."""
    modes = tracer.modes.get(node)
    if modes is None:
        return out.node_copy(node, lambda n: env[n])
    args: Any = fx.node.map_arg(node.args, lambda n: env[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n])
    if node.op != "call_module":
        assert callable(node.target)
        return out.call_function(UnderModes(node.target, modes), args, kwargs)
    module = out.get_attr(str(node.target))
    return out.call_function(UnderModes(call, modes), (module, *args), kwargs)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, as a function."""
    return module(*args, **kwargs)


def _send(out: fx.Graph, value: Any, c: Crossing) -> list[fx.Node]:
    """Return the nodes that send ``value``, one per tensor."""
    if not c.packed:
        flat = [value]
    elif isinstance(value, tuple):
        flat = list(value)
    else:
        flat = [out.call_function(getitem, (value, i)) for i in range(len(c.specs))]
    return [out.call_function(boundary, (x, c.trains)) for x in flat]


def boundary(t: torch.Tensor, trains: bool) -> torch.Tensor:
    """Return ``t`` ready to send: contiguous, no view, and in the autograd graph if it gets a gradient.

    A compiler cannot tell what is a view, so everything is cloned there.
    """
    if not trains:
        return t.detach().clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling() or t._is_view() or not t.is_contiguous() or t.is_leaf:
        t = t.clone(memory_format=torch.contiguous_format)
    return t


def _separate(parts: list[StagePart], plan: Plan) -> None:
    """Give each stage its own copy of a sharded tensor that two stages of a rank share.

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
