"""A certificate refuses faults that once passed it, and twelve faults that nobody had made yet."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from launcher.data import source
from launcher.parallel import grad_norm, gradient_all_reduce, parallel_model, stages, tied_parameters
from launcher.parallel.deferred_init import compare_builds, constructor, fill, replay
from launcher.parallel.dispatch.training_mode import Modes
from launcher.plan.refusals import model as model_effects
from launcher.runtime.training import averaging, batches, checkpoint_tensors, loop, pipeline
from launcher.steps import certify, train
from launcher.steps.certification.oracle import model as reference
from tests.steps.certified import REPLICAS, SHARDED, STAGES, TWO, certificate, of
from tests.tiers import some

Patch = pytest.MonkeyPatch
IGNORING: dict[str, Any] = {
    "data": {"_target_": "tests.steps.nets.Draws", "ignored": 3},
    "loss": {"name": "cross_entropy", "ignore_index": -100},
}  # fmt: skip
MOMENTUM: dict[str, Any] = {"optim": {"name": "sgd", "momentum": 0.9, "lr": 0.1}}


# faults that once passed


def draws_of_its_own(patch: Patch) -> None:
    """Each rank draws its own dropout, as in training."""
    patch.setattr(certify, "_draw_alike", lambda live, drawing: None)


def replayed_by_strides(patch: Patch) -> None:
    """Views are replayed with the recorded strides, whatever the layout of the tensor is; builds are not compared."""
    patch.setattr(replay, "_laid_out", lambda t, recorded: t)
    patch.setattr(compare_builds, "differing", lambda *_: "")


def never_in_training(patch: Patch) -> None:
    """train() is not called, so modules stay in the mode of their constructor."""
    patch.setattr(constructor, "in_training", lambda build: build())

    @classmethod  # type: ignore[misc]
    def as_they_are(cls: type[Modes], model: nn.Module, trial: nn.Module) -> Modes:
        return cls(tuple((m, m.training, False) for m in model.modules()))

    def by_flags(self: Modes, parts: Any, training: bool) -> None:
        for m, trains, _ in self.flags:
            m.training = training and trains

    patch.setattr(Modes, "from_model", as_they_are)
    patch.setattr(Modes, "switch", by_flags)


def statistics_of_one_rank(patch: Patch) -> None:
    """The planner accepts a forward that changes and reads a buffer with rank-local data."""
    patch.setattr(model_effects, "_changed", lambda *_: None)


def exported_as_another(patch: Patch) -> None:
    real = certify.export

    def wrong(src: Any, path: Any, trust: Any) -> None:
        real(src, path, trust)
        read = certify.load_file(path)
        save_file(read | {"b.weight": read["b.weight"].flip(0).contiguous()}, path)

    patch.setattr(certify, "export", wrong)


def reference_untied(patch: Patch) -> None:
    """module.to() makes two tensors of one, as it does on some devices."""
    real = reference.put

    def wrong(model: nn.Module, *more: Any) -> nn.Module:
        model = real(model, *more)
        model.c.weight = nn.Parameter(model.a.weight.detach().clone())  # type: ignore[union-attr, assignment]
        return model

    patch.setattr(reference, "put", wrong)


# faults that nobody had made yet


def not_clipped(patch: Patch) -> None:
    real = grad_norm.Norm.clip
    patch.setattr(
        grad_norm.Norm, "clip", lambda self, found, limit, loss_scale=1.0: real(self, found, None, loss_scale)
    )


def states_swapped(patch: Patch) -> None:
    """A load exchanges the momentum of two tensors of one shape."""
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        found = real(s, *args, **more)
        states = s.optimizer.state
        one, other = [p for p in states if p.dim() == 2 and p.shape[0] == p.shape[1]][:2]
        states[one], states[other] = states[other], states[one]
        return found

    patch.setattr(checkpoint_tensors, "load", wrong)


def buffers_not_loaded(patch: Patch) -> None:
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        found = real(s, *args, **more)
        for b in (b for part in s.model.parts for b in part.module.buffers() if b.is_floating_point()):
            b.zero_()
        return found

    patch.setattr(checkpoint_tensors, "load", wrong)


def tie_without_gradient(patch: Patch) -> None:
    patch.setattr(tied_parameters.Tied, "reduce", lambda self: None)


def mean_for_sum(patch: Patch) -> None:
    """Gradients of replicas are averaged, although each is a share of the sum."""
    real = gradient_all_reduce.all_reduce_gradients

    def wrong(tensors: Any, group: Any, dtype: Any = None) -> None:
        real(tensors, group, dtype)
        for t in tensors:
            t.grad /= torch.distributed.get_world_size(group)

    patch.setattr(gradient_all_reduce, "all_reduce_gradients", wrong)


def asleep_after_a_validation(patch: Patch) -> None:
    @contextmanager
    def wrong(self: Any) -> Any:
        self.modes.switch((p.module for p in self.parts), training=False)
        yield

    patch.setattr(parallel_model.ParallelModel, "evaluating", wrong)


def gradients_kept(patch: Patch) -> None:
    """Gradients are not cleared between two steps."""
    real = loop.step

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        patch.setattr(s.optimizer, "zero_grad", lambda set_to_none=True: None)
        return real(s, *args, **more)

    patch.setattr(loop, "step", wrong)


def last_sample_left_out(patch: Patch) -> None:
    real = batches.Feed.batch

    def wrong(self: Any, step: int) -> Any:
        batch = real(self, step)
        return replace(batch, inputs=batch.inputs and [torch.cat([x[:-1], x[:1]]) for x in batch.inputs])

    patch.setattr(batches.Feed, "batch", wrong)


def sent_in_fewer_bits(patch: Patch) -> None:
    def wrong(part: Any, plan: Any, meshes: Any) -> list[gradient_all_reduce.Bucketed]:
        return [
            gradient_all_reduce.Bucketed(b.tensors, b.group, torch.float32)
            for b in gradient_all_reduce.data_parallel_buckets(part, plan, meshes)
        ]

    patch.setattr(parallel_model, "data_parallel_buckets", wrong)


def mean_of_means(patch: Patch) -> None:
    """Each rank divides by the number of targets in its own batch."""

    def wrong(self: Any, targets: Any) -> None:
        self._total = torch.zeros((), dtype=torch.float64) if targets is None else self._loss.count(targets) * 2

    patch.setattr(pipeline._Count, "start", wrong)


def cut_from_its_past(patch: Patch) -> None:
    """The tensors that one stage sends to the next carry no gradient back."""
    patch.setattr(stages, "boundary", lambda t, trains: t.detach().clone().requires_grad_(trains))


def bias_not_trained(patch: Patch) -> None:
    real = parallel_model.ParallelModel.trainable

    def wrong(self: Any) -> Any:
        return [(name, t) for name, t in real(self) if name != "a.bias"]

    patch.setattr(parallel_model.ParallelModel, "trainable", wrong)


def shards_of_the_next_rank(patch: Patch) -> None:
    """Each rank fills its shard with numbers from a neighboring row of the full tensor."""
    real = fill.cut
    patch.setattr(fill, "cut", lambda whole, box: real(whole.roll(1, 0) if whole.dim() == 2 else whole, box))


def rows_reversed(patch: Patch) -> None:
    """Targets are in the reverse order of their samples."""
    real = batches.Feed.batch

    def wrong(self: Any, step: int) -> Any:
        batch = real(self, step)
        return replace(batch, targets=None if batch.targets is None else batch.targets.flip(0))

    patch.setattr(batches.Feed, "batch", wrong)


def rounded_at_a_save(patch: Patch) -> None:
    """A loaded checkpoint has fewer bits than the run that saved it."""
    real = checkpoint_tensors.load

    def wrong(s: Any, *args: Any, **more: Any) -> Any:
        found = real(s, *args, **more)
        with torch.no_grad():
            for _, t in s.model.named():
                local = fill.local(t)
                if local.is_floating_point():
                    local.copy_(local.to(torch.bfloat16))
        return found

    patch.setattr(checkpoint_tensors, "load", wrong)


def average_left_in_place(patch: Patch) -> None:
    """A validation of the average leaves it in the model."""
    patch.setattr(averaging.WeightAverage, "put_back", lambda self: None)


def early_after_a_load(patch: Patch) -> None:
    """A run that continues from a checkpoint has the learning rates of the next step."""
    shifts = [0]
    real, again = train.factors, certify._again

    def factors(settings: Any, total: int, allow: tuple[str, ...]) -> Any:
        share = real(settings, total, allow)
        return lambda step: share(step + shifts[-1])

    def loaded(live: Any, setup: Any) -> Any:
        shifts.append(1)
        return again(live, setup)

    patch.setattr(train, "factors", factors)
    patch.setattr(certify, "_again", loaded)


def every_epoch_alike(patch: Patch) -> None:
    """The second epoch has the order of the first."""
    real = source.batch_indices

    def wrong(seed: int, step: int, size: int, n: int) -> Any:
        return np.concatenate([real(seed, i % n, 1, n) for i in range(step * size, (step + 1) * size)])

    patch.setattr(source, "batch_indices", wrong)


def norm_without_a_stage(patch: Patch) -> None:
    real = grad_norm.build

    def wrong(model: Any) -> grad_norm.Norm:
        good = real(model)
        return good if model.parts[0].stage.index == 0 else grad_norm.Norm((), good.copies)

    patch.setattr(grad_norm, "build", wrong)


Fault = tuple[Any, dict[str, Any], dict[str, Any], str]
ONCE: dict[str, Fault] = {
    "masks of each rank's own": (
        draws_of_its_own, TWO, of("DropsAttentionInside"), r"step 1: the loss: error \S+ against one process \(and",
    ),
    "a constructor that is replayed to other numbers": (
        replayed_by_strides, TWO, of("Factored"),
        r"the weights at step 0 of vh: differs from a plain construction with the same draws$",
    ),
    "a model that nobody puts into training mode": (
        never_in_training, STAGES, of("HandedOutAsleep"), r"step 1: the loss: error \S+ against one process \(and",
    ),
    "an overridden train() that nobody calls": (
        never_in_training, STAGES, of("KeepsAsleep"), r"step 1: the loss: error \S+ against one process \(and",
    ),
    "statistics of the first rank, which the loss reads": (
        statistics_of_one_rank, TWO, of("Averaged", net_used=True),
        r"step 1: the statistics of follower\.seen: the loss of each rank reads its own copy, "
        r"but only that of the first rank is kept",
    ),
    "an export that reads back as another model": (
        exported_as_another, STAGES, of("Net"),
        r"step 3: what was exported of b\.weight: error \S+ against one process$",
    ),
    "a reference whose ties are lost": (
        reference_untied, STAGES, of("Tied"),
        r"the reference's tie of a\.weight: its names in one process are a\.weight$",
    ),
}  # fmt: skip
NEW: dict[str, Fault] = {
    "gradients that are not clipped": (
        not_clipped, TWO, of("Net"),
        r"step 2: the gradient of \S+: error \S+ against one",
    ),
    "momentum of another weight after a load": (
        states_swapped, TWO, of("Tall", **MOMENTUM),
        r"step 4: the weights after the update of \S+: error \S+ against one",
    ),
    "buffers that a load leaves out": (
        buffers_not_loaded, TWO, of("Normed"),
        r"step 3: what was loaded of norm\.running_mean: error \S+ against one process",
    ),
    "copies of a tie that never hear of each other": (
        tie_without_gradient, STAGES, {"model__layers": 2}, r"step 1: the gradient of embed\.weight: copies differ on",
    ),
    "gradients of replicas averaged twice": (
        mean_for_sum, REPLICAS, of("Net"), r"step 1: the gradient of \S+: error 5\.0e-01 against one process",
    ),
    "evaluation mode that a validation leaves behind": (
        asleep_after_a_validation, TWO, of("Normed"), r"step 4: the loss: error \S+ against one process",
    ),
    "gradients that are never cleared": (
        gradients_kept, TWO, of("Net"),
        r"step 2: the gradient of \S+: error \S+ against one",
    ),
    "a sample that is read twice": (
        last_sample_left_out, TWO, of("Net"),
        r"step 1: the loss: error \S+ against one process",
    ),
    "gradients that are sent in fewer bits": (
        sent_in_fewer_bits, REPLICAS, of("Net"),
        r"step 1: the gradient of \S+: error \d\.\de-0[789] against one process",
    ),
    "a mean of means": (mean_of_means, TWO, of("Net", **IGNORING), r"step 1: the loss: error \S+ against one process"),
    "a stage that gets no gradient": (
        cut_from_its_past, STAGES, of("Net"), r"step 1: the gradient of a\.\S+: is missing \(and",
    ),
    "a bias that the optimizer does not know": (
        bias_not_trained, TWO, of("Net"),
        r"step 1: the weights after the update of a\.bias: error \S+ against one process",
    ),
    "shards in another order": (
        shards_of_the_next_rank, SHARDED, of("Net"),
        r"the weights at step 0 of a\.weight: differs from a plain construction with the same draws",
    ),
    "targets of other samples": (rows_reversed, TWO, of("Net"), r"step 1: the loss: error \S+ against one process"),
    "an average that a validation leaves in the model": (
        average_left_in_place, TWO, of("Net", train__ema={"decay": 0.75, "every": 1}),
        r"step 4: the loss: error \S+ against one process",
    ),
    "the order of the first epoch in the second": (
        every_epoch_alike, TWO, of("Net"),
        r"step 5: the samples of the next batch of rank 0 in the next epoch: rank 0 would read other samples",
    ),
    "a norm without a stage": (
        norm_without_a_stage, STAGES, of("Net"), r"step 1: the global gradient norm: error \S+ against one process",
    ),
    "a learning rate one step early after a load": (
        early_after_a_load, TWO, of("Net", schedule={"name": "linear", "warmup_steps": 0}),
        r"step 4: the learning rate: error \S+ against one process",
    ),
    "a checkpoint of fewer bits": (
        rounded_at_a_save, SHARDED, of("Net"), r"step 3: what was loaded of \S+: error \d\.\de-03 against one process",
    ),
}  # fmt: skip


def judged(patch: Patch, fault: Fault) -> None:
    """Check that the certificate holds without the fault, and names the difference with it."""
    break_it, parallel, changes, said = fault
    if break_it is not statistics_of_one_rank:  # the planner refuses it
        fine = certificate(parallel, **changes)
        assert fine.holds, fine.verdict()
    break_it(patch)
    c = certificate(parallel, **changes)
    assert not c.holds
    assert re.match(r"does not hold \(allowed 1e-12\): " + f"(?:{said})", c.verdict()), c.verdict()


@pytest.mark.parametrize("case", some(ONCE, 7))
def test_a_fault_that_once_passed_is_caught(monkeypatch: Patch, case: str) -> None:
    judged(monkeypatch, ONCE[case])


@pytest.mark.parametrize("case", some(NEW, 4))
def test_a_new_fault_is_caught(monkeypatch: Patch, case: str) -> None:
    judged(monkeypatch, NEW[case])
