"""A certificate refuses bugs that other trainers shipped, and bugs that this project had."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.data import source
from launcher.job.schema.components import Schedule
from launcher.job.schema.steps import Certify
from launcher.optim import build as optimizers
from launcher.parallel import grad_norm, gradient_all_reduce, parallel_model, tied_parameters
from launcher.parallel.deferred_init import fill
from launcher.runtime.training import averaging, checkpoint_tensors, pipeline
from launcher.runtime.training import batches as feed
from launcher.steps import train
from tests.steps.certified import ALL, REPLICAS, SHARDED, STAGES, TWO, certificate, of
from tests.tiers import some

Patch = pytest.MonkeyPatch
EMA: dict[str, Any] = {"train__ema": {"decay": 0.75, "every": 2}}


def scaled(patch: Patch) -> None:
    real = pipeline.PipelineRuntime.__init__

    def wrong(self: Any, model: Any, *args: Any) -> None:
        real(self, model, *args)
        self.scale *= model.plan.sizes.micros

    patch.setattr(pipeline.PipelineRuntime, "__init__", wrong)


def counted_per_replica(patch: Patch) -> None:
    real = grad_norm.build

    def wrong(model: Any) -> grad_norm.Norm:
        replicas = model.plan.sizes.grid["dp_replicate"]
        good = real(model)
        return grad_norm.Norm(tuple((t, w * replicas) for t, w in good.pieces), good.copies)

    patch.setattr(grad_norm, "build", wrong)


def initialized_differently(patch: Patch) -> None:
    real = fill.fill

    def wrong(parts: Any, plan: Any, rank: int, device: Any, full_tensor: Any) -> None:
        at = plan.sizes.grid.coords(rank)["dp_replicate"]
        real(parts, plan, rank, device, lambda name: full_tensor(name) * (1 + at))

    patch.setattr(parallel_model, "fill", wrong)


def added_twice(patch: Patch) -> None:
    real = tied_parameters.Tied.reduce

    def wrong(self: Any) -> None:
        real(self)
        real(self)

    patch.setattr(tied_parameters.Tied, "reduce", wrong)


def last_skipped(patch: Patch) -> None:
    def wrong(part: Any, plan: Any, meshes: Any) -> list[gradient_all_reduce.Bucketed]:
        return [
            gradient_all_reduce.Bucketed(b.tensors[:-1], b.group)
            for b in gradient_all_reduce.data_parallel_buckets(part, plan, meshes)
        ]

    patch.setattr(parallel_model, "data_parallel_buckets", wrong)


def clipped_by_its_own_norm(patch: Patch) -> None:
    real = grad_norm.Norm.clip

    def wrong(self: grad_norm.Norm, found: float, limit: float | None, loss_scale: float = 1.0) -> None:
        real(self, self.squared().sqrt().item() / loss_scale, limit, loss_scale)

    patch.setattr(grad_norm.Norm, "clip", wrong)


def tied_counted_twice(patch: Patch) -> None:
    real = grad_norm.build

    def wrong(model: Any) -> grad_norm.Norm:
        tied = {id(t) for p, t in model.named() if len(p.stages) > 1}
        good = real(model)
        return grad_norm.Norm(tuple((t, w * (2 if id(t) in tied else 1)) for t, w in good.pieces), good.copies)

    patch.setattr(grad_norm, "build", wrong)


def second_copy_stale(patch: Patch) -> None:
    patch.setattr(checkpoint_tensors, "same_copies", lambda s: None)


def optimizer_lost(patch: Patch) -> None:
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        found = real(s, *args, **more)
        s.optimizer.state.clear()
        return found

    patch.setattr(checkpoint_tensors, "load", wrong)


def step_lost(patch: Patch) -> None:
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        found = real(s, *args, **more)
        s.step -= 1
        return found

    patch.setattr(checkpoint_tensors, "load", wrong)


def shifted(patch: Patch, by: int) -> None:
    real = train.factors

    def factors(settings: Schedule, total: int, allow: tuple[str, ...]) -> Callable[[int], float]:
        share = real(settings, total, allow)
        return lambda step: share(max(step + by, 0))

    patch.setattr(train, "factors", factors)


def one_late(patch: Patch) -> None:
    shifted(patch, -1)


def one_early(patch: Patch) -> None:
    shifted(patch, 1)


def never_set(patch: Patch) -> None:
    patch.setattr(train, "scale_lr", lambda optimizer, factor: float(optimizer.param_groups[0]["lr"]))


def padding_counted(patch: Patch) -> None:
    real = feed.Feed.held_out

    def wrong(self: feed.Feed, batches: int | None) -> Iterator[feed.Batch]:
        for batch in real(self, batches):
            yield replace(batch, valid=self.plan.sizes.local_batch)

    patch.setattr(feed.Feed, "held_out", wrong)


def evaluated_in_training_mode(patch: Patch) -> None:
    patch.setattr(parallel_model.ParallelModel, "evaluating", lambda self: nullcontext())


def in_order(patch: Patch) -> None:
    patch.setattr(source, "batch_indices", lambda seed, step, size, n: np.arange(step * size, (step + 1) * size) % n)


def ranks_swapped(patch: Patch) -> None:
    real = source.batch_indices
    patch.setattr(source, "batch_indices", lambda *at: np.roll(real(*at), 1))


def made(name: str, change: Any) -> Any:
    """Return a fault that changes one tensor at step 0 in the same way on every rank."""

    def patched(patch: Patch) -> None:
        real = fill.fill

        def wrong(parts: Any, plan: Any, rank: int, device: Any, full_tensor: Any) -> None:
            real(parts, plan, rank, device, lambda n: change(full_tensor(n)) if n == name else full_tensor(n))

        patch.setattr(parallel_model, "fill", wrong)

    return patched


def autocast_lost(patch: Patch) -> None:
    real = parallel_model.fill

    def wrong(parts: Any, *more: Any, **named: Any) -> None:
        real(parts, *more, **named)
        for m in (m for part in parts for m in part.module.modules() if hasattr(m, "low")):
            m.low = False

    patch.setattr(parallel_model, "fill", wrong)


def gradients_of_idle_experts_mixed(patch: Patch) -> None:
    """Gradients that a rank lacks are not filled in: its other gradients move up to the first tensors."""
    real = parallel_model.ParallelModel.reduce

    def wrong(self: Any) -> None:
        mine = [t for p, t in self.named() if p.trainable]
        for shape in {t.shape for t in mine}:
            alike = [t for t in mine if t.shape == shape]
            there: list[Tensor | None] = [t.grad for t in alike if t.grad is not None]
            if len(there) < len(alike):
                for t, g in zip(alike, [*there, *[None] * len(alike)], strict=False):
                    t.grad = g
        real(self)

    patch.setattr(parallel_model.ParallelModel, "reduce", wrong)


def scale_not_taken_back(patch: Patch) -> None:
    real = grad_norm.Norm.clip
    patch.setattr(grad_norm.Norm, "clip", lambda self, found, limit, loss_scale=1.0: real(self, found, limit))


def everything_decays(patch: Patch) -> None:
    def wrong(grouped: Any) -> list[dict[str, Any]]:
        return [{"params": params, **dict(group.settings), "weight_decay": 0.1} for group, params in grouped]

    patch.setattr(optimizers, "groups", wrong)


def rates_of_groups_lost(patch: Patch) -> None:
    real = optimizers.keep_rates

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"]
        real(optimizer)

    patch.setattr(optimizers, "keep_rates", wrong)


def of_another_rank(patch: Patch) -> None:
    """Statistics are not shared, so those of the last data-parallel rank are kept."""
    patch.setattr(parallel_model.Statistics, "broadcast", lambda self: None)


MUTATIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "pipeline gradients scaled by the number of micro batches": (
        scaled, ALL, r"step 1: the gradient of \S+: error 1\.0e\+00 against one process \(and",
    ),
    "a norm that counts every replica": (
        counted_per_replica, ALL, r"step 1: the global gradient norm: error 4\.1e-01 against one process \(and",
    ),
    "replicas initialized differently": (
        initialized_differently, ALL, r"the weights at step 0 of embed\.weight: copies differ on ranks 0 and 2 \(and",
    ),
    "a tied gradient added twice": (
        added_twice, ALL, r"step 1: the gradient of embed\.weight: error 1\.0e\+00 against one process \(and",
    ),
    "a bucket that skips its last parameter": (
        last_skipped, REPLICAS, r"step 1: the gradient of layers\.1\.mlp\.down\.weight: copies differ on ranks 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("break_it", "parallel", "said"), some(MUTATIONS.values(), 2), ids=some(MUTATIONS, 2))
def test_a_bug_that_other_trainers_shipped_is_caught(
    monkeypatch: Patch, break_it: Any, parallel: dict[str, Any], said: str
) -> None:
    break_it(monkeypatch)
    c = certificate(parallel, Certify(steps=1), model__layers=2)
    assert not c.holds
    assert re.match(r"does not hold \(allowed 1e-12\): " + said, c.verdict()), c.verdict()


LAYERS = {"model__layers": 2}
TIED = {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}, "hsdp": {"shard_size": 2, "threshold": 0}}


def average_a_step_late(patch: Patch) -> None:
    real = averaging.WeightAverage.follow
    patch.setattr(averaging.WeightAverage, "follow", lambda self, step: real(self, step + 1))


def average_of_gathered_weights_lost(patch: Patch) -> None:
    """The average is swapped in, but weights that were gathered in an earlier step do not change."""
    patch.setattr(averaging.WeightAverage, "_swap", lambda self: None)


def average_not_loaded(patch: Patch) -> None:
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any) -> Any:
        out = real(s, *args)
        s.average.begin_again()
        return out

    patch.setattr(checkpoint_tensors, "load", wrong)


LATE: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "clip by the rank's own norm": (
        clipped_by_its_own_norm, STAGES, LAYERS,
        r"step 2: the gradient of embed\.weight: copies differ on ranks 0 and 1 \(and",
    ),
    "a norm that counts tied weights twice": (
        tied_counted_twice, STAGES, LAYERS, r"step 1: the global gradient norm: error \S+ against one process \(and",
    ),
    "a second tied copy that is stale after a load": (
        second_copy_stale, TIED, {"model__layers": 4},
        r"step 3: what was loaded of embed\.weight: copies differ on ranks 0 and 0 \(and",
    ),
    "optimizer state that is lost at a load": (
        optimizer_lost, SHARDED, of("Net"),
        r"step 4: the weights after the update of \S+: error \S+ against one process \(and",
    ),
    "a step that is lost at a load": (
        step_lost, SHARDED, of("Net"),
        r"step 4: the loss: error \S+ against|"
        r"step 4: the samples of the next batch of rank 0: rank 0 would read other samples",
    ),
    "a learning rate one step late": (
        one_late, TWO, of("Net"), r"step 2: the learning rate: error 5\.0e-01 against one process \(and",
    ),
    "a learning rate one step early": (
        one_early, TWO, of("Net"), r"step 1: the learning rate: error 1\.0e\+00 against one process \(and",
    ),
    "a learning rate that is never set": (
        never_set, TWO, of("Net"),
        r"step 1: the weights after the update of a\.weight: error \S+ against one process \(and",
    ),
    "validation that counts padding": (
        padding_counted, TWO, of("Net"), r"step 4: the validation loss: error \S+ against one process$",
    ),
    "validation in training mode": (
        evaluated_in_training_mode, TWO, of("Normed"),
        r"step 4: the buffer of norm\.running_mean: error \S+ against one process \(and",
    ),
    "samples in the order of the file": (
        in_order, TWO, of("Net"), r"step 1: the loss: error \S+ against one process \(and",
    ),
    "samples of the next rank": (
        ranks_swapped, TWO, of("Normed"), r"step 1: the loss: error \S+ against one process \(and",
    ),
    "a standard deviation that is lost": (
        made("embed.weight", lambda t: t / t.std()), STAGES, LAYERS,
        r"the weights at step 0 of embed\.weight: its standard deviation is 1; "
        r"in 24 plain constructions it is 0\.0\S+ to 0",
    ),
    "a weight that is left at zeros": (
        made("a.weight", torch.zeros_like), TWO, of("Net"),
        r"the weights at step 0 of a\.weight: its standard deviation is 0; in 24 plain constructions",
    ),
    "a bias that nobody wrote": (
        made("norm.weight", lambda t: t * 1e33), TWO, of("Normed"),
        r"the weights at step 0 of norm\.weight: differs from the equal values of 24 plain constructions$",
    ),
    "weights that are no numbers": (
        made("a.weight", lambda t: t / 0), TWO, of("Net"),
        r"the weights at step 0 of a\.weight: has numbers that are not finite; a plain construction has none",
    ),
    "gradients of idle experts mixed": (
        gradients_of_idle_experts_mixed, TWO, of("Routed"), r"step \d: the gradient of experts\.each\.\d\.\S+: ",
    ),
    "weight decay on biases": (
        everything_decays, TWO, of("Net"),
        r"step 1: the weights after the update of \S+: error \S+ against one process \(and",
    ),
    "rates of groups that are lost": (
        rates_of_groups_lost, TWO, of("Net", optim={"name": "lion", "groups": {"a.*": {"lr": 0.25}}}),
        r"step 1: the weights after the update of a\.\S+: error \S+ against one process \(and",
    ),
    "a moving average that follows a step late": (
        average_a_step_late, TWO, of("Net", **EMA),
        r"step 1: the moving average of \S+: error \S+ against one process \(and",
    ),
    "a moving average that is not put in place": (
        average_of_gathered_weights_lost, SHARDED, of("Net", **EMA), r"step 4: the validation loss of the mov",
    ),
    "a moving average that a checkpoint loses": (
        average_not_loaded, TWO, of("Net", **EMA), r"step 4: the moving average of \S+: error \S+ against one process",
    ),
    "statistics of another rank": (
        of_another_rank, TWO, of("Normed"), r"step 1: the buffer of norm\.running_mean: copies differ on ranks 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", some(LATE, 2))
def test_a_bug_that_needs_an_independent_reference_is_caught(monkeypatch: Patch, case: str) -> None:
    break_it, parallel, changes, said = LATE[case]
    break_it(monkeypatch)
    c = certificate(parallel, **changes)
    assert not c.holds
    assert re.match(r"does not hold \(allowed 1e-12\): " + f"(?:{said})", c.verdict()), c.verdict()


OWN: dict[str, tuple[Any, str, str]] = {
    "autocast that is lost": (autocast_lost, "fp32", r"step 1: the loss: error \S+ against one process \(and"),
    "a loss scale that is not taken back": (
        scale_not_taken_back,
        "fp16",
        r"step 1: the gradient of \S+: error 1\.0e\+03",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_a_bug_of_a_precision_is_caught_in_that_precision(monkeypatch: Patch, case: str) -> None:
    break_it, precision, said = OWN[case]
    fine = certificate(TWO, Certify(precision=precision), **of("Autocast"))
    assert fine.holds, fine.verdict()
    break_it(monkeypatch)
    c = certificate(TWO, Certify(precision=precision), **of("Autocast"))
    assert not c.holds
    assert re.match(r"does not hold \(allowed 1e-06\): " + said, c.verdict()), c.verdict()
