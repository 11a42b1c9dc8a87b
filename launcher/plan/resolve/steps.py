"""``steps``: problems of steps that would otherwise show only after the training."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.components import Schedule
from launcher.job.schema.data import Text
from launcher.job.schema.job import Job
from launcher.job.schema.optim import WSD, CosineRestarts
from launcher.job.schema.steps import Predict, Train
from launcher.job.schema.user_class import Target
from launcher.plan import step_order
from launcher.plan.resolve import transform_targets
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.text import many
from launcher.plan.verbs import evaluates, trains


def problems(job: Job, sizes: Sizes | None) -> list[Problem]:
    """Returns problems for steps in a wrong order, without their inputs, or with an impossible layout."""
    return [
        *step_order.check(job.steps),
        *_samples(job),
        *_held_out(job),
        *_decay(job),
        *transform_targets.problems(job, sizes),
    ]


def _samples(job: Job) -> Iterator[Problem]:
    """Yields problems for ``sample`` steps without text data, which alone has a tokenizer for the prompt."""
    for name, step in job.steps.items():
        if step.kind == "sample" and not isinstance(job.data, Text):
            data_name = getattr(job.data, "name", "a class of your own")
            rest = ",".join(n for n in job.steps if n != name)
            yield Problem(
                f"steps.{name}", f"continues text, but data is {data_name}", quote(f"steps=[{rest}]")
            )


def _held_out(job: Job) -> Iterator[Problem]:
    """Yields a problem if steps read held-out samples although the request reserves none."""
    with_inputs = [n for n, s in job.steps.items() if isinstance(s, Predict) and s.inputs is not None]
    readers = [n for n, s in job.steps.items() if evaluates(s) and n not in with_inputs]
    if job.train.eval_every is not None and trains(job):
        readers.append("train.eval_every")
    if readers and getattr(job.data, "val_fraction", None) == 0 and getattr(job.data, "val", None) is None:
        text = f"0: leaves no held-out samples for {', '.join(readers)}"
        yield Problem("data.val_fraction", text)


def _decay(job: Job) -> Iterator[Problem]:
    """Yields a problem if the decay would begin before the warm-up ends.

    A training that is all warm-up has no decay, so that is no problem here.
    """
    schedule, steps = job.schedule, job.train.steps
    if not trains(job) or not isinstance(schedule, WSD) or steps is None or schedule.warmup_steps >= steps:
        return
    decay, after_warmup = schedule.decay(steps), steps - schedule.warmup_steps
    if decay > after_warmup:
        share = schedule.decay_steps is None
        key, number = ("decay_share", f"{schedule.decay_share:g}") if share else ("decay_steps", f"{decay}")
        is_so = f" is {many(decay, 'step')}, and" if share else ""
        text = (
            f"{number}:{is_so} schedule.warmup_steps={schedule.warmup_steps} "
            f"leaves {after_warmup} of train.steps={steps}"
        )
        yield Problem(f"schedule.{key}", text, f"schedule.decay_steps={after_warmup}")


def idle(job: Job, steps: int) -> Iterator[Note]:
    """Yields notes on settings that have no effect in a training of ``steps`` steps."""
    if not trains(job):
        return
    yield from _rates(job.schedule, steps)
    train, ends = job.train, f"which ends after {many(steps, 'step')}"
    watched = train.early_stop is not None or job.checkpoint.best is not None  # validates after the last step
    validates = train.eval_every is not None and (watched or train.eval_every < steps)
    if train.eval_every is not None and not validates:
        yield Note("train.eval_every", f"{train.eval_every}: no validation runs during the training, {ends}")
    if train.eval_batches is not None and not validates:
        text = f"{train.eval_batches}: has no effect, because no validation runs during the training"
        if any(s.kind == "evaluate" for s in job.steps.values()):
            text += "; the step evaluate has steps.evaluate.batches"
        yield Note("train.eval_batches", text)
    if job.checkpoint.every is not None and job.checkpoint.every >= steps:
        text = f"{job.checkpoint.every}: no checkpoint is saved during the training, {ends}"
        yield Note("checkpoint.every", text)
    if train.ema is not None and train.ema.every > steps:
        text = f"{train.ema.every}: the average stays at the initial weights of the training, {ends}"
        yield Note("train.ema.every", text)


def _rates(schedule: Schedule, steps: int) -> Iterator[Note]:
    """Yields notes on parts of the schedule that ``steps`` do not reach, and on the steps of a share."""
    if isinstance(schedule, Target):
        return
    warm, training = schedule.warmup_steps, f"the training, {many(steps, 'step')}"
    if warm >= steps:
        yield Note("schedule.warmup_steps", f"{warm}: {training}, is all warm-up")
    elif isinstance(schedule, CosineRestarts) and warm + schedule.period_steps >= steps:
        text = f"{schedule.period_steps}: there is no restart, because {training}, ends before it"
        yield Note("schedule.period_steps", text)
    elif isinstance(schedule, WSD) and schedule.decay_steps is None:
        share = f"schedule.decay_share={schedule.decay_share:g} of {many(steps, 'step')}"
        yield Note("schedule.decay_steps", f"null -> {schedule.decay(steps)}: {share}")


def end_of_train(step: Train, job: Job, total: int) -> int:
    """Returns the step count at which this ``train`` of ``job`` ends: all of them share ``total`` evenly."""
    every = [s for s in job.steps.values() if isinstance(s, Train)]
    which = next(n for n, s in enumerate(every, 1) if s is step)
    return total * which // len(every)
