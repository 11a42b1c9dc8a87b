"""Trains and validates: the loop over optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from launcher.errors import RunError
from launcher.objective.metrics import values
from launcher.runtime.faults import Preempted
from launcher.runtime.training import monitored_metrics, save, throughput
from launcher.runtime.training.monitored_metrics import Watched
from launcher.runtime.training.session import Session


@dataclass(frozen=True)
class Loop:
    """Settings of the loop; ``None`` means never.

    ``lr`` sets the rate for the next update of the weights, given the number of updates so far, and returns
    it. ``keep``: how many checkpoints are kept; ``None`` means all. With ``early_stop`` or ``best``, which
    use validations, a validation also follows the last step.
    """

    until: int
    lr: Callable[[int], float]
    clip: float | None
    log_every: int
    eval_every: int | None
    eval_batches: int | None
    save_every: int | None
    keep: int | None
    units: int
    unit: str
    early_stop: Watched | None = None
    best: Watched | None = None

    @property
    def watches(self) -> bool:
        return self.early_stop is not None or self.best is not None


def train(s: Session, loop: Loop) -> None:
    """Runs optimizer steps from ``s.step`` up to ``loop.until``, or until a metric or a callback ends it.

    Once any rank has been asked to stop, it saves and raises ``Preempted`` on all ranks. If a validation is
    skipped then, it runs after resuming. The row after a checkpoint reports how long the save delayed
    training, as ``save_stall_ms``.
    """
    try:
        _train(s, loop)
    except BaseException:
        if s.profile is not None:
            s.profile.drop()
        raise
    if s.profile is not None:
        s.profile.end()


def _train(s: Session, loop: Loop) -> None:
    stall: dict[str, float] = {}
    s.passed = 0
    stop_if_requested(s)
    if s.average is not None:
        s.average.begin()
    _call(s, "on_start", s.results)
    late = s.resumed and due(s, loop) and s.results.get("val_step") != s.step
    if late and _validation(s, loop):
        save.attempt(s, loop.keep)
    while s.step < loop.until and not _ended(s, loop):
        # a step
        save.check(s)
        began = time.perf_counter()
        if s.times is not None:
            s.times.begin()
        if s.drill is not None:
            s.drill.before(s.step + 1)
        if s.profile is not None:
            s.profile.before(s.step + 1)
        lr = loop.lr(s.step - s.scaling.skipped)
        loss_scale = s.scaling.factor
        loud = (s.step + 1) % loop.log_every == 0 or s.step + 1 == loop.until
        with s.compile_timeout.around(s.model.compiled), s.late_state.around(s.model):
            loss, norm = step(s, loop.clip, measuring=loud)
        s.step += 1
        if s.profile is not None:
            s.profile.after(s.step)
        if s.drill is not None:
            s.drill.after(s.step)
        if s.average is not None:
            s.average.follow(s.step)
        if math.isfinite(loss):
            s.results |= {"loss": loss, **s.measured}

        # report its results
        _call(s, "on_step", {"loss": loss, "lr": lr, "grad_norm": norm})
        if s.local_norm is not None:
            s.local_norm.tell(s.step, loud, loss_scale)
        if s.world.rank == 0 and loud and math.isfinite(loss + norm):
            figures = {"loss": loss, **s.measured, "lr": lr, "grad_norm": norm}
            s.emit(_row(s, loop, figures, time.perf_counter() - began) | stall)
            stall = {}

        # then stop if requested, validate, and save
        if s.stopping:
            stop(s)
        better = due(s, loop) and _validation(s, loop)
        if better or (loop.save_every and s.step % loop.save_every == 0 and s.step < loop.until):
            began = time.perf_counter()
            save.attempt(s, loop.keep)
            stall = {"save_stall_ms": (time.perf_counter() - began) * 1e3}
    _call(s, "on_end", s.results)


def _validation(s: Session, loop: Loop) -> bool:
    """Runs a validation and what depends on its result; returns true if these weights are the best so far."""
    validate(s, loop.eval_batches)
    _call(s, "on_eval", {name: v for name, v in s.results.items() if name.startswith("val_")})
    if loop.early_stop is not None:
        monitored_metrics.count_validation(s, loop.early_stop)
    return loop.best is not None and monitored_metrics.is_best(s, loop.best)


def _ended(s: Session, loop: Loop) -> bool:
    """Returns true, after a save, if a callback or early stopping ends training. All ranks call it."""
    text = ""
    if s.callbacks is not None and s.callbacks.agreed():
        text = "a callback requested it"
    if monitored_metrics.out_of_patience(s, loop.early_stop):
        assert loop.early_stop is not None
        text = monitored_metrics.reason(s, loop.early_stop)
    if not text:
        return False
    if s.world.rank == 0:
        s.emit({"text": f"stopping after {s.step} of {loop.until} steps: {text}"})
    if s.results.get("saved_step") != s.step:
        save.attempt(s, loop.keep)
    return True


def _call(s: Session, hook: str, metrics: Mapping[str, float]) -> None:
    if s.callbacks is not None:
        s.callbacks.call(hook, s.step, metrics)


def _row(s: Session, loop: Loop, figures: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Returns the row that rank 0 reports for a step that took ``seconds``."""
    row = {
        "step": s.step,
        "steps": loop.until,
        **figures,
        **throughput.units_per_second(loop.unit, loop.units, seconds),
        "step_ms": seconds * 1e3,
        "bubble": s.plan.estimate.timeline.bubble,
        **s.figures.row(seconds),
        **s.by_rank,
    }

    # figures that only some runs have
    if s.scaling.dynamic:
        row["loss_scale"] = s.scaling.factor
    if s.scaling.skipped:
        row["skipped"] = s.scaling.skipped
    if s.unsaved:
        row["unsaved"] = s.unsaved
    return row


def due(s: Session, loop: Loop) -> bool:
    """Returns true if a validation follows the step that has just finished."""
    if loop.eval_every is None or s.step == 0:
        return False
    return loop.watches if s.step == loop.until else s.step % loop.eval_every == 0


def stop_if_requested(s: Session) -> None:
    """Stops all ranks if any of them has been asked to stop. All ranks call it between two pieces of work."""
    requested = torch.tensor(bool(s.world.stop_signal()), dtype=torch.int32)
    dist.all_reduce(requested)
    if requested.item():
        stop(s)


def stop(s: Session) -> NoReturn:
    """Stops, after all ranks have agreed to."""
    signals = torch.tensor(s.world.stop_signal(), dtype=torch.int32)
    dist.all_reduce(signals, dist.ReduceOp.MAX)
    signum = int(signals.item())
    if s.world.rank == 0:
        # does not name the signal: the launcher may have received another one, which it names itself
        s.emit({"text": f"stopping after {s.step} steps"})
    if s.average is not None:
        s.average.put_back()
    raise Preempted(signum, s.on_stop())


def step(s: Session, clip: float | None, measuring: bool = False) -> tuple[float, float]:
    """Takes an optimizer step; returns the loss of the global batch and the norm before clipping.

    ``measuring``: updates ``s.measured``; the sums of metrics are reduced together with the loss. If loss or
    norm is not finite, the weights are not updated. With dynamic loss scaling all ranks then skip the step
    and lower the scale; otherwise, or if the scale cannot be lowered, it raises ``RunError``.
    """
    # gradients, and this rank's share of the loss
    batch = s.feed.batch(s.step)
    s.optimizer.zero_grad(set_to_none=True)
    share = s.pipeline.step(batch.inputs, batch.targets, s.scaling.factor, measuring)

    # one all-reduce for the loss, the norm, requests to stop, and metrics
    difference = s.model.changes.any_difference()
    both, square = s.norm.squared_beside(torch.stack([share, difference.to(share.device)]))
    share, difference = both.unbind()
    if text := s.model.changes.take(any_difference=bool(difference > 0)):
        raise RunError(f"step {s.step + 1}: {text}. The weights were not changed")
    sums = torch.stack([share, square, torch.tensor(float(bool(s.world.stop_signal())))])
    if s.times is not None:
        s.times.arrived()
    if measuring:
        own = [] if s.times is None else [s.times.share()]
        sums = torch.cat([sums, s.pipeline.measured.flatten().cpu(), *own])
    dist.all_reduce(sums)
    mean, squares, stop_requests, *rest = sums.tolist()
    measured, each = rest[: 2 * len(s.pipeline.metrics)], rest[2 * len(s.pipeline.metrics) :]
    s.stopping = stop_requests > 0
    norm = math.sqrt(squares) / s.scaling.factor if squares >= 0 else math.nan
    loss = mean * s.plan.loss_terms

    # not finite: skip the step, or end the run
    if not math.isfinite(loss + norm):
        _check_counted(s)
        if not s.scaling.lowest:
            _skip(s)
            return loss, norm
        if s.local_norm is not None:  # show which rank and which parameter
            s.local_norm.tell(s.step + 1, loud=True, loss_scale=s.scaling.factor)
        text = f"the loss is {loss} and the gradient norm {norm}; the weights were not changed"
        cure = ". Lower optim.lr, lengthen schedule.warmup_steps, or look at the data of this step"
        if s.scaling.factor > 1 and math.isfinite(loss):
            cure = ". The gradients overflowed; train.loss_scale=null lowers the scale when they do"
        raise RunError(f"step {s.step + 1}: {text}{cure}")

    if measuring:
        s.measured = values(s.pipeline.metrics, _pairs(measured), f"step {s.step + 1}")
        s.by_rank = throughput.rank_figures(each) if each else {}
    s.norm.clip(norm, clip, s.scaling.factor)
    s.optimizer.step()
    s.scaling.went_well()
    return loss, norm


def _pairs(sums: list[float]) -> list[tuple[float, float]]:
    """Returns the sum and the count of each metric."""
    return list(zip(sums[::2], sums[1::2], strict=True))


def _check_counted(s: Session) -> None:
    """Raises ``RunError`` if the loss is NaN because nothing was counted, or because counts disagree."""
    wrong = torch.tensor(float(bool(s.pipeline.loss.problem())), dtype=torch.float64)
    counted = torch.stack([s.pipeline.count.total().cpu(), wrong])
    dist.all_reduce(counted)
    if counted[1].item():
        text = "the count that the loss returns differs from its count(target), by which its sum is divided"
        cure = "the weights were not changed. Look at the class of the loss"
        raise RunError(f"step {s.step + 1}: {text}; {cure}")
    if not counted[0].item():
        text = f"{_nothing(s, 'the global batch')}, so there is no loss"
        cure = "the weights were not changed. Look at the data of this step"
        raise RunError(f"step {s.step + 1}: {text}; {cure}")


def _nothing(s: Session, batch: str) -> str:
    """Returns the reason why no target of ``batch`` counts."""
    objective = s.plan.objective
    if objective.classes:
        return f"all targets of {batch} are {objective.ignored}, which are ignored"
    return f"count(target) of the loss is 0 for {batch}"


def _skip(s: Session) -> None:
    """Skips an fp16 step whose gradients overflowed.

    Every rank has the same norm, so either all ranks call it or none.
    """
    was = s.scaling.factor
    s.scaling.overflowed()
    s.optimizer.zero_grad(set_to_none=True)
    if s.world.rank == 0:
        text = f"skipped: gradients overflowed at loss scale {was:g}; the scale is now {s.scaling.factor:g}"
        s.emit({"text": f"step {s.step + 1}: {text}"})


def validate(s: Session, batches: int | None, suffix: str = "") -> float:
    """Returns the loss over the held-out samples, each counted once, computed as in ``step``.

    ``suffix``: added to the names of the results, if the weights are not the trained ones.
    """
    sums = torch.zeros(2 + 2 * len(s.pipeline.metrics), dtype=torch.float64)
    for batch in s.feed.held_out(batches):
        stop_if_requested(s)
        both = s.pipeline.evaluate(batch.inputs, batch.targets, batch.valid)
        sums += torch.cat([both, s.pipeline.measured.flatten()]).cpu()
    dist.all_reduce(sums)

    # the mean, on every rank
    total, counted, *measured = sums.tolist()
    where = f"validation after step {s.step}"
    if not counted:
        cure = "so there is no loss. Look at the held-out data"
        raise RunError(f"{where}: {_nothing(s, 'the held-out samples')}, {cure}")
    loss: float = total / counted * s.plan.loss_terms
    metrics = values(s.pipeline.metrics, _pairs(measured), where)
    figures = {f"val_{name}{suffix}": value for name, value in ({"loss": loss} | metrics).items()}
    s.results |= {**figures, f"val_step{suffix}": s.step}
    if s.world.rank == 0:
        late = {"after": s.passed} if s.passed > s.step else {}
        s.emit({"step": s.step, **figures, **late})
    return loss
