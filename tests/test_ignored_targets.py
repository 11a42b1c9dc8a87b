"""Targets of -100 are ignored: in every layout the loss is the mean over all other targets of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.job.schema.job import Job
from launcher.parallel import grad_norm
from launcher.parallel.deferred_init import fill
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop
from launcher.steps.certification.compare import pieces
from launcher.steps.model import build_session, evaluate_in_one_process
from tests.parallel.sources import Holed
from tests.parity import Step, assert_same, batch, build, job, outcome, own, place, plain
from tests.parity.reference import Outcome
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

Holes = Callable[[Plan, Tensor], Tensor]
"""Returns true for the targets of a global batch that become -100."""


def random(plan: Plan, y: Tensor) -> Tensor:
    return torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.4


def a_rank(plan: Plan, y: Tensor) -> Tensor:
    """Also ignore all targets of the first data-parallel rank, or of half the batch if there is only one rank."""
    holes = random(plan, y)
    holes[: min(plan.sizes.local_batch, len(y) // 2)] = True
    return holes


def a_micro_batch(plan: Plan, y: Tensor) -> Tensor:
    """Also ignore all targets of the last micro batch of every rank, but none of the first sample of the batch."""
    holes = random(plan, y)
    holes.view(plan.sizes.replicas, plan.sizes.micros, -1)[:, -1] = True
    holes[0] = False
    return holes


def a_piece(plan: Plan, y: Tensor) -> Tensor:
    """Also ignore all targets of the first piece of every sequence."""
    holes = random(plan, y)
    holes[:, : plan.pieces[0] if plan.pieces else y.shape[1] // 2] = True
    return holes


def all_but_one(plan: Plan, y: Tensor) -> Tensor:
    holes = torch.ones_like(y, dtype=torch.bool)
    holes.view(-1)[-2] = False
    return holes


def none(plan: Plan, y: Tensor) -> Tensor:
    return torch.zeros_like(y, dtype=torch.bool)


TOKENS: tuple[Holes, ...] = (random, a_rank, a_micro_batch, a_piece, all_but_one, none)
CLASSES: tuple[Holes, ...] = (random, a_rank, a_micro_batch, all_but_one, none)

UP: dict[str, Any] = {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}
SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
HEAD: dict[str, Any] = {"head": {"weight": ["tp", None]}}
PIECES: dict[str, Any] = {"stages": 2, "micro_batch_num": 4, "seq_chunks": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, 4 micro batches": {"pipeline": {"micro_batch_num": 4}},
    "1f1b": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "1f1b x shard 2, level3": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "2 replicas x shard 2": {"hsdp": SHARD, "grid": {"dp_replicate": 2}},
    "tp 2": {"operators": UP, "grid": {"tp": 2}},
    "tp 2, classes cut": {"operators": HEAD, "grid": {"tp": 2}},
    "tp 2, classes cut, 2 replicas": {"operators": HEAD, "grid": {"tp": 2, "dp_replicate": 2}},
    "seqpipe": {"pipeline": PIECES | {"scheduler": "seqpipe"}},
    "seqpipe, classes cut": {"pipeline": PIECES | {"scheduler": "seqpipe"}, "operators": HEAD, "grid": {"tp": 2}},
    "seqvpp": {"pipeline": PIECES | {"scheduler": "seqvpp", "interleave": True}},
    "zero_bubble_v": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}},
    "zero_bubble_v x shard 2": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}, "hsdp": SHARD},
}  # fmt: skip


def tokens(parallel: dict[str, Any], **more: Any) -> Job:
    return job(parallel=parallel, model__tied="operators" not in parallel, **more)


def images(parallel: dict[str, Any]) -> Job:
    stages = parallel.get("pipeline", {}).get("stages", 1)
    return own("nets.Vision", [4, 4], stages=stages, train__batch_size=8, parallel=parallel)


def holed(j: Job, plan: Plan, holes: Holes) -> tuple[tuple[Tensor, ...], Tensor]:
    xs, y = batch(j, plan)
    return xs, y.masked_fill(holes(plan, y), -100)


def rank_steps(world: World, j: Job, plan: Plan, every: tuple[Holes, ...]) -> list[Step]:
    """Run a forward and backward for each way of making holes; return loss, norm, and the pieces of the rank."""
    par, pipe = build(world, j, plan)
    at, n = place(plan, par.meshes), plan.sizes.local_batch
    mine = slice(at * n, (at + 1) * n)
    out = []
    for holes in every:
        for _, p in par.trainable():
            p.grad = None
        xs, y = holed(j, plan, holes)
        both = torch.stack([pipe.step(tuple(x[mine] for x in xs), y[mine]), grad_norm.build(par).squared()])
        torch.distributed.all_reduce(both)
        out.append((both[0].item(), both[1].sqrt().item(), pieces(par)))
    return out


def in_one_process(j: Job, plan: Plan, holes: Holes, times: int = 1) -> Outcome:
    """Return the outcome of plain torch on the full batch; gradients and norm are those of ``times`` the loss."""
    model = plain(j, plan)
    xs, y = holed(j, plan, holes)
    loss = F.cross_entropy(model(*xs).flatten(0, -2), y.flatten())
    (loss * times).backward()
    mine = fill.tensors(model)
    grads = {p.name: g for p in plan.params if p.trainable and (g := mine[p.name].grad) is not None}
    square = torch.stack([g.double().square().sum() for g in grads.values()]).sum()
    return Outcome(loss.item(), square.sqrt().item(), grads, {})


def assert_plain(j: Job, every: tuple[Holes, ...], times: int = 1, tolerance: float = 1e-12) -> None:
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_steps, j, plan, every)
    for i, holes in enumerate(every):
        got, want = outcome(plan, [r[i] for r in ranks]), in_one_process(j, plan, holes, times)
        try:
            assert_same(replace(got, buffers={}), want, tolerance)
        except AssertionError as error:
            error.add_note(f"holes: {holes.__name__}")
            raise


@pytest.mark.parametrize("layout", some(LAYOUTS))
def test_tokens_with_holes_equal_torch_on_the_whole_batch(layout):
    assert_plain(tokens(LAYOUTS[layout]), TOKENS)


@pytest.mark.parametrize("layout", some(["1f1b", "2 replicas x shard 2", "1f1b x shard 2, level3"]))
def test_images_with_holes_equal_torch_on_the_whole_batch(layout):
    assert_plain(images(LAYOUTS[layout]), CLASSES)


TIMES: dict[str, tuple[int, dict[str, Any]]] = {
    "loss_reduction: sum": (2, {"pipeline": {"stages": 2, "loss_reduction": "sum"}, "grid": {"dp_replicate": 2}}),
    "gradients_mean: false": (2, {"grid": {"dp_replicate": 2}, "gradients_mean": False}),
    "both": (4, {"pipeline": {"stages": 2, "loss_reduction": "sum"}, "hsdp": SHARD, "gradients_mean": False}),
    "loss_repeated_mean: false": (2, LAYOUTS["tp 2"] | {"loss_repeated_mean": False}),
}  # fmt: skip


@pytest.mark.parametrize("switch", some(TIMES))
def test_a_switch_makes_gradients_a_multiple_of_the_means(switch):
    times, parallel = TIMES[switch]
    assert_plain(tokens(parallel), (random, a_rank), times)


HALVES = [
    *product(("1f1b", "2 replicas x shard 2", "tp 2, classes cut", "seqpipe"), ("bf16",)),
    *product(("tp 2, classes cut", "seqpipe"), ("fp16",)),
]


@pytest.mark.parametrize(("layout", "precision"), some(HALVES))
def test_half_precision_is_near_and_never_nan(layout, precision):
    """This compares with fp32 in one process, with a wide tolerance; other tests check half precision exactly."""
    j = tokens(LAYOUTS[layout], train__precision=precision, train__loss_scale=1.0)
    full = tokens(LAYOUTS[layout], train__precision="fp32")
    plan = plan_job(j)
    every = (a_rank, a_micro_batch, a_piece)
    ranks = on_ranks(plan.sizes.grid.size, rank_steps, j, plan, every)
    for i, holes in enumerate(every):
        got, want = outcome(plan, [r[i] for r in ranks]), in_one_process(full, plan_job(full), holes)
        assert_same(replace(got, buffers={}), want, 0.1)


def through_the_data(parallel: dict[str, Any], **arguments: Any) -> Job:
    data = {"_target_": "tests.parallel.sources.Holed", "seq_len": 8} | arguments
    return job(parallel=parallel, data=data, security__allow=("tests",))


def rank_session(world: World, j: Job, plan: Plan, folder: Path) -> tuple[float, float, float]:
    """Run the training loop; return the validation loss, then loss and norm of the first step."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    val = loop.validate(s, None)
    return val, *loop.step(s, None)


EVERYWHERE = [n for n in LAYOUTS if "tp" not in n and "classes" not in n]


@pytest.mark.parametrize("layout", some(EVERYWHERE))
def test_reported_losses_are_means_over_all_counted_targets(layout, tmp_path):
    """The 8 training samples are one batch. The 13 validation samples do not fill theirs, and padding is ignored."""
    j = through_the_data(LAYOUTS[layout])
    plan = plan_job(j)
    model, train, val = plain(j, plan), Holed(8, "train"), Holed(8, "val")
    loss = F.cross_entropy(model(train.tokens).flatten(0, -2), train.following.flatten())
    loss.backward()
    square = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()
    held_out = F.cross_entropy(model(val.tokens).flatten(0, -2), val.following.flatten())
    want = torch.stack([held_out, loss, square.sqrt()]).detach()
    for got in on_ranks(plan.sizes.grid.size, rank_session, j, plan, tmp_path):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-12, atol=0)
    assert abs(evaluate_in_one_process.held_out_loss(model, j, None) - held_out.item()) <= 1e-12


SUMMED = {n: LAYOUTS[n] for n in ("one rank, 4 micro batches", "1f1b", "seqpipe", "zero_bubble_v x shard 2")}


@pytest.mark.parametrize("layout", some(SUMMED))
def test_a_loss_that_is_asked_for_as_a_sum_is_reported_as_one(layout, tmp_path):
    """In training and in validation, it is the mean loss of plain torch times the number of micro batches."""
    pipe = LAYOUTS[layout]["pipeline"]
    j = through_the_data(LAYOUTS[layout] | {"pipeline": pipe | {"loss_reduction": "sum"}})
    plan = plan_job(j)
    micros = plan.sizes.micros
    model, train, val = plain(j, plan), Holed(8, "train"), Holed(8, "val")
    counted = (train.following != -100).sum()
    parts = zip(train.tokens.chunk(micros), train.following.chunk(micros), strict=True)
    losses = [
        F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") * micros / counted for x, y in parts
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    square = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()
    held_out = micros * F.cross_entropy(model(val.tokens).flatten(0, -2), val.following.flatten())
    want = torch.stack([held_out, loss, square.sqrt()]).detach()
    for got in on_ranks(plan.sizes.grid.size, rank_session, j, plan, tmp_path):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-12, atol=0)
    assert abs(evaluate_in_one_process.held_out_loss(model, j, None, plan.loss_terms) - held_out.item()) <= 1e-12


@pytest.mark.parametrize(("layout", "precision"), [
    *product(("one rank", "1f1b", "2 replicas x shard 2", "seqpipe"), ("fp32",)), ("2 replicas x shard 2", "fp16"),
    ("seqpipe", "fp16"),
])  # fmt: skip
def test_a_batch_in_which_nothing_counts_ends_the_run(layout, precision, tmp_path):
    """This holds with dynamic loss scaling, too, which would skip the step and lower the scale forever."""
    j = through_the_data(LAYOUTS[layout], empty=1, val_samples=0)
    j = j.model_copy(update={"train": j.train.model_copy(update={"precision": precision})})
    plan = plan_job(j)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(plan.sizes.grid.size, rank_only_step, j, plan, tmp_path)
    assert failed.value.fault.message == (
        "step 1: all targets of the global batch are -100, which are ignored, so there is no loss; "
        "the weights were not changed. Look at the data of this step"
    )


def rank_only_step(world: World, j: Job, plan: Plan, folder: Path) -> None:
    loop.step(build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN), None)


def rank_only_validate(world: World, j: Job, plan: Plan, folder: Path) -> None:
    loop.validate(build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN), None)


def test_a_validation_in_which_nothing_counts_ends_the_run(tmp_path):
    j = through_the_data(LAYOUTS["1f1b"], empty=1)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_only_validate, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "validation after step 0: all targets of the held-out samples are -100, which are ignored, so "
        "there is no loss. Look at the held-out data"
    )
