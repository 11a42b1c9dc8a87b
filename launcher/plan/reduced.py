"""The small copy of a run that ``certify`` trains: the same layout, fewer layers, samples and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from launcher.job.models import Constant, LanguageModel
from launcher.job.parallel import LocalNorm
from launcher.job.schema import Debug, Job
from launcher.job.steps import Certify
from launcher.plan.sizes import Note, Sizes

TOLERANCE: Final = {"fp64": 1e-12, "fp32": 1e-6}
SAMPLES = 2
"""A micro batch: one alone has no variance to normalise by."""


@dataclass(frozen=True)
class Copy:
    """``changes``: (key, ``was -> is``) of all that the copy does not take over."""

    job: Job
    changes: tuple[tuple[str, str], ...]
    tolerance: float


def reduced(job: Job, step: Certify, sizes: Sizes) -> Copy:
    """Widths, vocabulary and lengths stay: sharding thresholds and fusion depend on them."""
    micro = min(SAMPLES, sizes.micro_batch)
    batch = job.train.batch_size // sizes.micro_batch * micro
    model, changes = job.model, []
    if isinstance(model, LanguageModel) and (layers := _layers(job, model, sizes)) < model.layers:
        changes.append(("model.layers", f"{model.layers} -> {layers}"))
        model = model.model_copy(update={"layers": layers})
    asked = job.train
    for key, was, now in (("train.batch_size", asked.batch_size, batch), ("train.steps", asked.steps, step.steps),
                          ("train.precision", asked.precision, step.precision)):  # fmt: skip
        if was != now:
            changes.append((key, f"{was} -> {now}"))
    train = asked.model_copy(
        update={"batch_size": batch, "steps": step.steps, "precision": step.precision, "eval_every": None}
    )
    parallel = job.parallel.model_copy(update={"local_norm": LocalNorm()})
    # a warm-up would make the first updates too small to compare
    update: dict[str, Any] = {"model": model, "train": train, "parallel": parallel, "debug": Debug(), "steps": {},
              "schedule": Constant(name="constant")}  # fmt: skip
    return Copy(job.model_copy(update=update), tuple(changes), step.tolerance or TOLERANCE[step.precision])


def notes(job: Job, sizes: Sizes) -> Iterator[Note]:
    """What each ``certify`` trains."""
    for name, step in job.steps.items():
        if isinstance(step, Certify):
            copy = reduced(job, step, sizes)
            what = ", ".join(f"{key} {change}" for key, change in copy.changes) or "nothing changed"
            yield Note(f"steps.{name}", f"trains a copy first: {what}; errors up to {copy.tolerance:.0e} are allowed")


def _layers(job: Job, model: LanguageModel, sizes: Sizes) -> int:
    """One a virtual stage, two at least; all of them when a setting names a layer by its number."""
    named = [*job.parallel.operators, *(job.parallel.shared if job.parallel.shared != "auto" else ())]
    if job.parallel.pipeline.stage_config != "auto" or any(re.search(r"layers\.\d", str(n)) for n in named):
        return model.layers
    return min(model.layers, max(2, sizes.virtual))
