"""The small copy of a run that ``certify`` trains: the same layout, fewer layers, samples and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from launcher.job.schema.components import Schedule
from launcher.job.schema.data import Chat, RandomTokens, Text
from launcher.job.schema.debug import Debug
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.job.schema.optim import WSD, Constant, CosineRestarts
from launcher.job.schema.parallel import LocalNorm
from launcher.job.schema.steps import Certify
from launcher.job.schema.train import Ema, Train
from launcher.job.schema.user_class import Target
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.precision import precision

TOLERANCE: Final = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 8 * 2.0**-8, "fp16": 8 * 2.0**-11}
"""The largest error that is allowed, by precision.

Half precision allows 8 roundings, because a layout may round in another order than one process does. It
rounds the terms of operators cut over ``tp`` before they are summed (at most 5 were measured, with 8 layers
on 4 ranks), what later pieces of a sequence read from earlier ones (2), the two gradients of a tied
parameter (1), and gradients that are sent in half precision (2). A compiler omits roundings between
operations (2.1). Other layouts sum their gradients in fp32, so they must meet the fp32 tolerance.
"""
SCALE: Final = 1024.0
"""A constant loss scale: a step that only one of the two trainings skips cannot be compared."""
SAMPLES = 2
"""Samples per micro batch: a single sample has no variance to normalize by."""
ROOM, BYTES = 256, 257
"""The approximate bytes of the longest conversation that ships, and the vocabulary size of byte tokens."""
MORE = 3
"""Steps after the requested ones: one on samples that leave experts idle, one after a load, one not trained.

The schedule includes the last one, so a learning rate that is one step early differs from the right one.
"""
WARMUP, FINAL = 2, 0.1
"""The most warm-up steps and the least final factor of the learning rate.

A longer warm-up would make the first updates too small to compare; a final factor of 0 the last one.
"""
DECAY, EVERY = 0.75, 2
"""The largest ``decay`` and ``every`` of a moving average.

An average that hardly moves in a few steps could not be distinguished from one that never moves.
"""
PERIOD = 2
"""Steps to the first restart: in a longer period the few rates would all be close to the maximum."""


@dataclass(frozen=True)
class Copy:
    """The small job, and the largest error that is allowed in it.

    ``changes``: (key, ``was -> is``) of every setting in which the copy differs from the run.
    """

    job: Job
    changes: tuple[tuple[str, str], ...]
    tolerance: float


def copies(job: Job, step: Certify, sizes: Sizes) -> tuple[Copy, ...]:
    """Returns a copy in the precision to certify, and another in the run's precision if that differs.

    Each precision can have its own bugs: casts that get lost, gradients that are sent in too few bits.
    """
    first = reduced(job, step, sizes)
    if step.precision == job.train.precision:
        return (first,)
    own = reduced(job, step.model_copy(update={"precision": job.train.precision, "tolerance": None}), sizes)
    return first, replace(own, tolerance=max(own.tolerance, step.tolerance or 0.0))


def reduced(job: Job, step: Certify, sizes: Sizes) -> Copy:
    """Returns the copy of ``job`` that ``step`` trains, with fewer layers, samples and steps.

    Widths, vocabulary and lengths stay the same, because sharding thresholds and fusion depend on them.
    Data that needs a tokenizer file is replaced: conversations by those that ship with the launcher, if a
    sample has room for them, and anything else by random tokens.
    """
    changes = []

    model = job.model
    if isinstance(model, LanguageModel):
        layers = _layers(job, model, sizes)
        if layers < model.layers:
            changes.append(("model.layers", f"{model.layers} -> {layers}"))
            model = model.model_copy(update={"layers": layers})

    data = job.data
    if isinstance(data, Chat) and data.tokenizer == "file" and _shipped(data):
        changes.append(("data.tokenizer", "file -> bytes, on conversations that ship with the launcher"))
        bare = {"path": None, "val": None, "template": None, "cache": None}
        data = data.model_copy(
            update={"tokenizer": "bytes", "tokenizer_file": None, "too_long": "cut", **bare}
        )
    elif isinstance(data, Text | Chat) and data.tokenizer == "file":
        changes.append(("data", f"{data.name} -> random_tokens"))
        size = data.vocab_size or 1  # the planner has resolved it by now
        data = RandomTokens(name="random_tokens", vocab_size=size, seq_len=data.seq_len)

    train, lengths = _train(job, step, sizes)
    schedule, rates = _schedule(job.schedule, step.steps + MORE)
    for key, was, now in (*lengths, *rates):
        if was != now:
            changes.append((key, f"{was} -> {now}".replace("None", "null")))

    # everything that the request adds to training is left out
    update: dict[str, Any] = {
        "model": model, "data": data, "train": train, "debug": Debug(), "steps": {}, "schedule": schedule,
        "metrics": (),
        "parallel": job.parallel.model_copy(update={"local_norm": LocalNorm()}),
        "checkpoint": job.checkpoint.model_copy(update={"every": None, "best": None}),
        "callbacks": (),
    }  # fmt: skip
    copy = job.model_copy(update=update)
    return Copy(copy, tuple(changes), step.tolerance or _tolerance(copy, sizes))


def _shipped(data: Chat) -> bool:
    """Returns true if the conversations that ship can replace those of ``data``."""
    return data.seq_len >= ROOM and (data.vocab_size or 0) >= BYTES


def _train(job: Job, step: Certify, sizes: Sizes) -> tuple[Train, list[tuple[str, Any, Any]]]:
    """Returns settings for a few steps of few samples, and what they change: (key, was, is)."""
    settings = job.train
    # strategies over device matrices decide how many parts they cut samples into
    micro = sizes.micro_batch if sizes.engine.over_matrices else min(SAMPLES, sizes.micro_batch)
    changes: dict[str, Any] = {
        "batch_size": settings.batch_size // sizes.micro_batch * micro,
        "steps": step.steps + MORE,
        "precision": step.precision,
    }
    if step.precision == "fp16":
        changes["loss_scale"] = settings.loss_scale or SCALE
    differences = [(f"train.{key}", getattr(settings, key), now) for key, now in changes.items()]
    if settings.ema is not None:
        changes["ema"] = now = Ema(decay=min(settings.ema.decay, DECAY), every=min(settings.ema.every, EVERY))
        differences += [
            (f"train.ema.{key}", getattr(settings.ema, key), getattr(now, key)) for key in ("decay", "every")
        ]
    beside = {"loss_scale": None, "eval_every": None, "epochs": None, "early_stop": None}
    return settings.model_copy(update=beside | changes), differences


def _schedule(schedule: Schedule, steps: int) -> tuple[Schedule, list[tuple[str, Any, Any]]]:
    """Returns a schedule whose phases all occur within ``steps``, and what it changes: (key, was, is)."""
    if isinstance(schedule, Target):
        return schedule, []
    warmup = min(schedule.warmup_steps, WARMUP)
    changes: dict[str, float] = {"warmup_steps": warmup}
    if not isinstance(schedule, Constant):
        changes["final"] = max(schedule.final, FINAL)
    if isinstance(schedule, CosineRestarts):
        changes["period_steps"] = min(schedule.period_steps, PERIOD)
    if isinstance(schedule, WSD):
        changes["decay_steps"] = max(steps - warmup - 1, 0)  # one step is left for the stable phase
    differences = [(f"schedule.{key}", getattr(schedule, key), now) for key, now in changes.items()]
    return schedule.model_copy(update=changes), differences


def _tolerance(job: Job, sizes: Sizes) -> float:
    dtypes = precision(job)
    same = sizes.grid["tp"] == sizes.grid["pp"] == 1 and dtypes.reduce == dtypes.kept
    same = same and job.train.compile is None
    return TOLERANCE["fp32" if dtypes.mixed and same else job.train.precision]


def notes(job: Job, sizes: Sizes) -> Iterator[Note]:
    """Yields a note for each ``certify`` step that says what it trains."""
    for name, step in job.steps.items():
        if isinstance(step, Certify):
            first, *own = copies(job, step, sizes)
            changed = ", ".join(f"{key} {change}" for key, change in first.changes) or "nothing changed"
            others = [f"one in {c.job.train.precision}, errors up to {c.tolerance:.0e}" for c in own]
            then = "".join(f"; then {other}" for other in others)
            allowed = f"errors up to {first.tolerance:.0e} are allowed"
            yield Note(f"steps.{name}", f"trains a copy first: {changed}; {allowed}{then}")


def _layers(job: Job, model: LanguageModel, sizes: Sizes) -> int:
    """Returns the number of layers of the copy.

    It is one per virtual stage, but at least two. If a setting or file names layers by number, all are kept.
    """
    named = [*job.parallel.operators, *(job.parallel.shared if job.parallel.shared != "auto" else ())]
    if job.parallel.param_strategy.load is not None:
        return model.layers
    # a glob may match only some layers
    groups = {} if isinstance(job.optim, Target) else job.optim.groups
    lora = () if model.lora is None else model.lora.modules
    globs = [*groups, *([lora] if isinstance(lora, str) else lora)]
    if any(re.search(r"[\d?\[]", key) for key in globs):
        return model.layers
    if job.parallel.pipeline.stage_config != "auto" or any(re.search(r"layers\.\d", str(n)) for n in named):
        return model.layers
    return min(model.layers, max(2, sizes.virtual))
