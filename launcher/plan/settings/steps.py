"""``steps``: problems of steps that would otherwise show only after the training."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.components import Schedule, Target, Text
from launcher.job.schema.job import Job
from launcher.job.schema.optim import WSD, CosineRestarts
from launcher.job.schema.steps import Evaluate, Export, Predict, Transform
from launcher.plan import step_order
from launcher.plan.sizes import Note, Sizes
from launcher.plan.values.text import many
from launcher.plan.verbs import evaluates


def problems(job: Job, sizes: Sizes | None) -> list[Problem]:
    """Returns problems for steps in a wrong order, without their inputs, or with an impossible layout."""
    return [
        *step_order.check(job.steps),
        *_samples(job),
        *_held_out(job),
        *_decay(job),
        *_targets(job, sizes),
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
    if job.train.eval_every is not None and _trains(job):
        readers.append("train.eval_every")
    if readers and getattr(job.data, "val_fraction", None) == 0 and getattr(job.data, "val", None) is None:
        text = f"0: leaves no held-out samples for {', '.join(readers)}"
        yield Problem("data.val_fraction", text)


def _decay(job: Job) -> Iterator[Problem]:
    """Yields a problem if the decay would begin before the warm-up ends.

    A training that is all warm-up has no decay, so that is no problem here.
    """
    schedule, steps = job.schedule, job.train.steps
    if not _trains(job) or not isinstance(schedule, WSD) or steps is None or schedule.warmup_steps >= steps:
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


def _trains(job: Job) -> bool:
    return any(s.kind == "train" for s in job.steps.values())


HOUR = 3600  # seconds

LAYOUT = ("nproc", "stages", "shard_size", "tp")
"""The settings of ``transform`` that define a layout without a strategy file."""


def _targets(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields problems for layouts that ``transform`` cannot make, or that are defined twice."""
    for name, step in job.steps.items():
        if not isinstance(step, Transform):
            continue
        key = f"steps.{name}"
        source = sizes.grid["pp"] if step.src is None and sizes is not None else None
        yield from _rank_files(key, step, job)

        # the layout comes from the settings or from a file
        if step.strategy is None:
            yield from unmergeable(key, source, **{field: getattr(step, field) for field in LAYOUT})
            continue
        for field in LAYOUT:
            n = getattr(step, field)
            if n != 1:
                text = f"{n}: the layout is that of the strategy file {step.strategy}"
                yield Problem(f"{key}.{field}", text, f"{key}.{field}=1")


def unmergeable(
    key: str, source: int | None, *, nproc: int, stages: int, shard_size: int, tp: int = 1
) -> Iterator[Problem]:
    """Yields problems of a target layout, whose settings are below ``key``.

    Stages can be merged, but never cut, because cutting needs the model. ``source``: the number of stages of
    the checkpoint, if known.
    """
    for name, n in (("nproc", nproc), ("stages", stages), ("shard_size", shard_size), ("tp", tp)):
        if n < 1:
            yield Problem(f"{key}.{name}", f"{n}: must be at least 1", f"{key}.{name}=1")
    if min(nproc, stages, shard_size, tp) < 1:
        return

    fits = stages
    if source is not None and source % stages:
        fits = max(n for n in range(1, min(stages, source) + 1) if source % n == 0)
        text = f"{stages}: cannot be made from {many(source, 'stage')}; stages are merged, not cut"
        yield Problem(f"{key}.stages", text, f"{key}.stages={fits}")

    unit = fits * shard_size * tp
    if nproc % unit:
        ways = f" x {tp}-way tensor parallelism" if tp > 1 else ""
        text = f"{nproc}: does not divide into {many(fits, 'stage')} x {many(shard_size, 'shard')}{ways}"
        yield Problem(f"{key}.nproc", text, f"{key}.nproc={-(-nproc // unit) * unit}")


def _rank_files(key: str, step: Transform, job: Job) -> Iterator[Problem]:
    """Yields problems for settings that only some sources have, and for steps that cannot read rank files."""
    if step.src_strategy is not None and step.src is None:
        text = f"{step.src_strategy}: the run's own checkpoint says how it is laid out"
        yield Problem(f"{key}.src_strategy", text, f"{key}.src_strategy=null")
    if step.format == "launcher":
        if step.prefix is not None:
            text = f"{step.prefix}: begins the names of rank files, which format=launcher does not write"
            yield Problem(f"{key}.prefix", f"{text}; give {key}.format=safetensors or ckpt")
        return

    for name, other in job.steps.items():
        reads = isinstance(other, Evaluate) and other.of == "transformed"
        reads = reads or (isinstance(other, Export) and other.src is None and _behind(job, key, name))
        if reads:
            text = f"reads what {key} writes, which with format={step.format} is rank files, not a checkpoint"
            yield Problem(f"steps.{name}", text)


def _behind(job: Job, key: str, name: str) -> bool:
    """Whether the step ``name`` comes after that of ``key``."""
    names = list(job.steps)
    return names.index(key.removeprefix("steps.")) < names.index(name)


def idle(job: Job, steps: int) -> Iterator[Note]:
    """Yields notes on settings that have no effect in a training of ``steps`` steps."""
    if not _trains(job):
        return
    yield from _rates(job.schedule, steps)
    rare = (
        ("train.eval_every", job.train.eval_every, "validation"),
        ("checkpoint.every", job.checkpoint.every, "checkpoint"),
    )
    for key, every, event in rare:
        if every is not None and every >= steps:
            yield Note(key, f"{every}: no {event} while training, which ends after {many(steps, 'step')}")


def unsaved(job: Job, steps: int, seconds: float) -> Iterator[Note]:
    """Yields a note if a failure would lose an hour of training or more.

    The training has ``steps`` steps that take ``seconds`` each, as predicted.
    """
    if job.checkpoint.every is not None or job.checkpoint.best is not None:
        return

    # the longest sequence of trainings without a save in between; each ``train`` has an equal share of steps
    kinds = [step.kind for step in job.steps.values()]
    rows = " ".join(kind for kind in kinds if kind in ("train", "save")).split("save")
    longest = max(row.count("train") for row in rows)
    hours = seconds * steps * longest / max(kinds.count("train"), 1) / HOUR
    if hours < 1:
        return

    every = _round_down(HOUR / 2 / seconds)
    cure = f"checkpoint.every={every} saves every {seconds * every / 60:.0f} minutes"
    if rows[-1]:
        names = [step_order.choice(name, step.kind) for name, step in job.steps.items()]
        names.insert(len(kinds) - kinds[::-1].index("train"), "save")
        cure += f" and {quote('steps=[' + ','.join(names) + ']')} at the end"
    text = f"nothing is saved before the end: {hours:.1f} hours, as predicted, would be lost"
    yield Note("checkpoint.every", f"null: {text}; {cure}")


def _round_down(n: float) -> int:
    """Returns the largest of 1, 2, 5, 10, 20, 50 and so on that is not above ``n``; at least 1.

    >>> [_round_down(n) for n in (0.3, 1.9, 7, 545, 2000)]
    [1, 1, 5, 500, 2000]
    """
    power: int = 10 ** max(len(str(int(n))) - 1, 0)
    return max(digit for digit in (1, 2, 5) if digit * power <= max(n, 1)) * power


def _rates(schedule: Schedule, steps: int) -> Iterator[Note]:
    """Yields notes on parts of the schedule that ``steps`` do not reach, and on the steps of a share."""
    if isinstance(schedule, Target):
        return
    warm, training = schedule.warmup_steps, f"the training, {many(steps, 'step')}"
    if warm >= steps:
        yield Note("schedule.warmup_steps", f"{warm}: {training}, is all warm-up")
    elif isinstance(schedule, CosineRestarts) and warm + schedule.period_steps >= steps:
        text = f"{schedule.period_steps}: no restart: {training}, ends before it"
        yield Note("schedule.period_steps", text)
    elif isinstance(schedule, WSD) and schedule.decay_steps is None:
        share = f"schedule.decay_share={schedule.decay_share:g} of {many(steps, 'step')}"
        yield Note("schedule.decay_steps", f"null -> {schedule.decay(steps)}: {share}")
