"""What operators over ``tp`` send, keep and leave behind is what the plan says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.job.schema.job import Job
from launcher.objective.losses import cross_entropy
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Box
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from tests.parity import batch, build, job, plain, step
from tests.ranks import on_ranks
from tests.test_parity_tp import MEGATRON, SEQUENCE


def counted(world: World, j: Job, plan: Plan) -> tuple[Counter[str], int]:
    """How often each collective ran over ``tp`` in one step, and the bytes that were gathered or reduced."""
    par, pipe = build(world, j, plan)
    calls: Counter[str] = Counter()
    sent = 0
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        real = getattr(dist, name)

        def count(first: Any, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            nonlocal sent
            if kwargs.get("group") is par.meshes.tp:
                calls[_name] += 1
                whole = args[0] if _name == "reduce_scatter" else first
                sent += sum(t.nbytes for t in (whole if isinstance(whole, list) else [whole]))
            return _real(first, *args, **kwargs)

        setattr(dist, name, count)
    step(j, par, pipe)
    return calls, sent


PIPELINES: dict[str, dict[str, Any]] = {
    "whole": {"micro_batch_num": 2},
    "in pieces": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2, "micro_batch_num": 2},
}


@pytest.mark.parametrize("pipeline", list(PIPELINES.values()), ids=list(PIPELINES))
@pytest.mark.parametrize("operators", [MEGATRON, SEQUENCE], ids=["megatron", "sequence"])
def test_a_step_sends_the_collectives_of_the_plan_and_their_bytes(operators, pipeline):
    j = job(parallel={"operators": operators, "grid": {"tp": 2}, "pipeline": pipeline}, train__precision="fp32")
    plan = plan_job(j)
    planned = Counter(c.op for s in plan.operators.spreads for c in s.comms)
    planned = Counter({op: 2 * n for op, n in planned.items()})  # two micro batches
    planned["all_reduce"] += 2 * 2 * plan.sizes.pieces + len(plan.sums)  # the loss, and what is summed once a step
    nbytes = 2 * sum(c.nbytes for s in plan.operators.spreads for c in s.comms)
    nbytes += 2 * 3 * plan.output[0].nbytes // plan.output[0].shape[-1]
    nbytes += sum(b.nbytes + 4 * len(b.names) for b in plan.sums)  # per tensor also: is there a gradient
    ranks = on_ranks(plan.sizes.grid.size, counted, j, plan)
    for tp in range(2):
        every = [r for i, r in enumerate(ranks) if plan.sizes.grid.coords(i)["tp"] == tp]
        assert sum((calls for calls, _ in every), Counter()) == planned
        assert sum(sent for _, sent in every) == nbytes


def predicted(world: World, j: Job, plan: Plan) -> torch.Tensor | None:
    _, pipe = build(world, j, plan)
    return pipe.predict(batch(j, plan)[0])


def test_broadcast_outputs_have_all_classes_on_every_rank():
    pipeline = {"stages": 2, "output_broadcast": True}
    j = job(parallel={"operators": MEGATRON, "grid": {"tp": 2}, "pipeline": pipeline})
    plan = plan_job(j)
    want = plain(j, plan)(*batch(j, plan)[0]).detach()
    for got in on_ranks(4, predicted, j, plan):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def boxes(world: World, j: Job, plan: Plan) -> dict[str, tuple[Box | None, tuple[int, ...], int]]:
    """For each parameter, this rank's box, the shape of its local shard, and its number of mesh axes."""
    par, _ = build(world, j, plan)  # ``check`` has compared every piece with its box
    out = {}
    for p, t in par.named():
        mine = t.to_local() if isinstance(t, DTensor) else t
        out[p.name] = p.layout.box(world.rank), tuple(mine.shape), len(t.placements) if isinstance(t, DTensor) else 0
    return out


def test_fsdp_cuts_again_what_tp_has_cut():
    parallel = {"operators": SEQUENCE, "grid": {"tp": 2}, "hsdp": {"threshold": 0}}
    j = job(parallel=parallel, launch={"nproc": 4})
    plan = plan_job(j)
    placed = {p.name: p.layout.split for p in plan.params}
    assert placed["layers.0.attn.q.weight"] == (("tp", "dp_shard"), ())
    assert placed["layers.0.attn.o.weight"] == (("dp_shard",), ("tp",))
    assert placed["layers.0.attn_norm.weight"] == (("dp_shard",),)
    found = on_ranks(4, boxes, j, plan)
    assert [f["layers.0.attn.q.weight"] for f in found] == [
        (Box((lo, 0), (lo + 4, 16)), (4, 16), 2) for lo in (0, 8, 4, 12)
    ]
    assert [f["layers.0.attn.o.weight"] for f in found] == [
        (Box((row, col), (row + 8, col + 8)), (8, 8), 2) for row in (0, 8) for col in (0, 8)
    ]
    assert all(b is not None and b.shape == shape for f in found for b, shape, _ in f.values())


def test_a_rank_holds_and_keeps_a_part_of_what_it_would_hold_alone():
    alone = plan_job(job(model__tied=False)).estimate.memory[0]
    over = plan_job(job(parallel={"operators": SEQUENCE, "grid": {"tp": 2}}, model__tied=False)).estimate.memory[0]
    norms = 9 * 16 * 8
    assert over.params == (alone.params - norms) // 2 + norms
    assert over.activations < 0.6 * alone.activations


def losses(world: World, logits: torch.Tensor, target: torch.Tensor) -> tuple[float, torch.Tensor]:
    axis = Axis(world.size, world.rank, dist.group.WORLD)
    mine = axis.piece(logits, -1).requires_grad_()
    loss = cross_entropy(mine, target, axis)
    (3 * loss).backward()
    assert mine.grad is not None
    return loss.item(), mine.grad


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
def test_the_loss_over_parts_of_the_classes_is_that_over_all(scale):
    g = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(3, 5, 12, generator=g, dtype=torch.float64)
    target = torch.randint(0, 12, (3, 5), generator=g)
    target[0, 1] = -100
    whole = logits.clone().requires_grad_()
    want = cross_entropy(whole, target)
    (3 * want).backward()
    got = on_ranks(4, losses, logits, target)
    assert [abs(loss - want.item()) <= 1e-14 * want.item() for loss, _ in got] == [True] * 4
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([grad for _, grad in got], -1), whole.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("target", [-1, 12])
def test_a_target_that_is_no_class_of_any_part_is_never_silent(target):
    logits = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = on_ranks(2, losses, logits, torch.tensor([[3, target]]))
    assert [loss != loss for loss, _ in got] == [True, True]
