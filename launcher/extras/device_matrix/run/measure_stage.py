"""Measures the memory of a stage over device matrices by running its first micro batches on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from launcher.extras.device_matrix.hsdp import ShardedParam
from launcher.extras.device_matrix.resolve import StageSharding
from launcher.extras.device_matrix.run.apply import Weights
from launcher.extras.device_matrix.run.program import StageGroups, StageProgram
from launcher.extras.device_matrix.search.repeats import unnamed
from launcher.extras.device_matrix.step_memory import StageBytes
from launcher.parallel.cost.kernels import FusedKernels
from launcher.parallel.cost.memory import MetaMeter
from launcher.parallel.fsdp.shard import HalfWeight, HalfWeights
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.values.tensor_spec import TensorSpec

Loss = Callable[[Tensor], Tensor]
META = torch.device("meta")


def measure_stages(
    stages: Sequence[StageSharding],
    level: str | None,
    loss: Loss | None,
    kept: Mapping[str, str],
    micros: int,
) -> list[StageBytes]:
    """Measures each stage; stages that are equal but for names are measured once.

    ``loss`` is applied to the last stage's output.
    """
    known: dict[Any, StageBytes] = {}
    out = []
    for at, stage in enumerate(stages):
        mine = loss if at == len(stages) - 1 else None
        key = (*_nameless(stage, kept), mine)
        if key not in known:
            known[key] = measure_stage(stage, level, mine, kept, micros)
        out.append(known[key])
    return out


def _nameless(stage: StageSharding, kept: Mapping[str, str]) -> tuple[Any, ...]:
    """Returns everything that a stage's memory depends on, without names."""
    graph = stage.train.graph
    places = dict(graph.params)
    params = tuple((places[p.name], replace(p, name=""), kept.get(p.name)) for p in stage.params)
    return replace(stage.train, graph=unnamed(graph)), params


def measure_stage(
    stage: StageSharding, level: str | None, loss: Loss | None, kept: Mapping[str, str], micros: int
) -> StageBytes:
    """Measures one stage.

    Micro batches after the first are equal, so at most two of ``micros`` run. Ranks are equal too, except for
    what they exchange.

    Args:
        loss: applied to the last stage's output.
        kept: the dtypes in which parameters are stored, by name.
    """
    groups = StageGroups(rank=0, groups={})
    graph = stage.train.graph
    trained = frozenset(n for n, v in graph.params if graph.values[v].trains)
    kept = {p.name: p.spec.dtype for p in stage.params} | {**kept}
    skeleton = _skeleton(stage.params, trained, kept)
    halves = _halves(skeleton, stage.params, kept)
    program = StageProgram(stage.train, groups, META)
    weights = Weights(skeleton, stage.params, level, groups, names={})
    masters = list(skeleton.parameters())
    with MetaMeter(before=(*masters, *skeleton.buffers())) as meter, FusedKernels():
        at_rest = meter.now
        weights.gather()
        with halves.running():
            ready = meter.now
            run = partial(_micro_batch, meter, program, weights, halves, stage, loss)
            activations, forward, first = run()
            shards = sum(p.grad.untyped_storage().nbytes() for p in masters if p.grad is not None)
            full_grads = meter.now - ready - shards
            later = run()[2] if micros > 1 else first
            before = meter.now
        meter.restart()
        weights.reduce()
        again = weights.regather.count
        return StageBytes(
            gathered=ready - at_rest,
            kept=activations,
            forward=forward,
            first=first,
            later=later,
            grads=shards,
            gathered_grads=full_grads,
            reduced=max(0, meter.peak - before),
            reduced_grads=meter.now - at_rest,
            regathered=tuple(again[p.name] // min(micros, 2) for p in stage.params),
        )


def _micro_batch(
    meter: MetaMeter,
    program: StageProgram,
    weights: Weights,
    halves: HalfWeights,
    stage: StageSharding,
    loss: Loss | None,
) -> tuple[int, int, int]:
    """Returns the bytes kept after a forward, the peak of the forward, and the peak of the backward."""
    before = meter.now
    meter.restart()
    values = stage.train.graph
    specs = zip(stage.takes, (values.values[v].trains for v in values.inputs), strict=True)
    with weights.regather:
        outs, _ = program.run([_empty(s).requires_grad_(trains) for s, trains in specs], weights)
    made = [t for t in outs if t.requires_grad]
    if loss is not None and made:
        made = [loss(outs[0])]
    kept, forward = meter.now - before, meter.peak - before

    meter.restart()
    if made:
        torch.autograd.backward(made, [torch.empty_like(t) for t in made])
        halves.collect()
    return kept, forward, meter.peak - before


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=META)


def _skeleton(
    params: tuple[ShardedParam, ...], trained: frozenset[str], kept: Mapping[str, str]
) -> nn.Module:
    """Returns a module with only these parameters, as a rank stores them."""
    root = nn.Module()
    for p in params:
        *path, name = p.name.split(".")
        at = root
        for step in path:
            if step not in at._modules:
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        t = torch.empty(p.rest.local_shape(p.spec.shape), dtype=dtype_of(kept[p.name]), device=META)
        if p.name in trained:
            at.register_parameter(name, nn.Parameter(t))
        else:
            at.register_buffer(name, t)
    return root


def _halves(skeleton: nn.Module, params: tuple[ShardedParam, ...], kept: Mapping[str, str]) -> HalfWeights:
    """Returns half-precision copies of parameters that are stored in another dtype than they compute in."""
    copies = []
    for p in params:
        owner, _, name = p.name.rpartition(".")
        module = skeleton.get_submodule(owner)
        master = module._parameters.get(name)
        if master is not None and kept[p.name] != p.spec.dtype:
            copies.append(HalfWeight(master, dtype_of(p.spec.dtype), ((module, name),)))
    return HalfWeights(tuple(copies))
