"""The small copy of a run that ``certify`` trains: the same layout, fewer layers, samples and steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from launcher.job.models import Constant, LanguageModel, RandomTokens, Text
from launcher.job.parallel import LocalNorm
from launcher.job.schema import Debug, Job
from launcher.job.steps import Certify
from launcher.plan.precision import precision
from launcher.plan.sizes import Note, Sizes

TOLERANCE: Final = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 8 * 2.0**-8, "fp16": 8 * 2.0**-11}
"""In half precision 8 roundings, where a layout rounds in another order than one process: the terms of operators cut
over ``tp`` before they are added up (most measured: 5, of 8 layers on 4 ranks), what later pieces of a sequence read
of earlier ones (2), the two gradients of a tied parameter (1), gradients that travel in it (2). Other layouts are held
to what fp32 is, in which their gradients are added up."""
SCALE: Final = 1024.0
"""A loss scale that stays what it is: a step that one of two trainings skips cannot be compared."""
SAMPLES = 2
"""A micro batch: one alone has no variance to normalise by."""


@dataclass(frozen=True)
class Copy:
    """``changes``: (key, ``was -> is``) of all that the copy does not take over."""

    job: Job
    changes: tuple[tuple[str, str], ...]
    tolerance: float


def reduced(job: Job, step: Certify, sizes: Sizes) -> Copy:
    """Widths, vocabulary and lengths stay: sharding thresholds and fusion depend on them.

    A tokenizer out of a file comes with weights, and neither is needed to compare numbers: tokens are made at random.
    """
    micro = min(SAMPLES, sizes.micro_batch)
    batch = job.train.batch_size // sizes.micro_batch * micro
    model, data, changes = job.model, job.data, []
    if isinstance(model, LanguageModel) and (layers := _layers(job, model, sizes)) < model.layers:
        changes.append(("model.layers", f"{model.layers} -> {layers}"))
        model = model.model_copy(update={"layers": layers})
    if isinstance(data, Text) and data.tokenizer == "file":
        changes.append(("data", f"{data.name} -> random_tokens"))
        data = RandomTokens(name="random_tokens", vocab_size=data.vocab_size, seq_len=data.seq_len)
    asked = job.train
    scale = asked.loss_scale or SCALE if step.precision == "fp16" else None
    for key, was, now in (("train.batch_size", asked.batch_size, batch), ("train.steps", asked.steps, step.steps),
                          ("train.precision", asked.precision, step.precision),
                          *([("train.loss_scale", asked.loss_scale, scale)] if scale else [])):  # fmt: skip
        if was != now:
            changes.append((key, f"{was} -> {now}".replace("None", "null")))
    train = asked.model_copy(
        update={"batch_size": batch, "steps": step.steps, "precision": step.precision, "eval_every": None,
                "loss_scale": scale}
    )  # fmt: skip
    parallel = job.parallel.model_copy(update={"local_norm": LocalNorm()})
    # a warm-up would make the first updates too small to compare
    update: dict[str, Any] = {
        "model": model, "data": data, "train": train, "parallel": parallel, "debug": Debug(), "steps": {},
        "schedule": Constant(name="constant"),
    }  # fmt: skip
    copy = job.model_copy(update=update)
    return Copy(copy, tuple(changes), step.tolerance or _tolerance(copy, sizes))


def _tolerance(job: Job, sizes: Sizes) -> float:
    dtypes = precision(job)
    same = sizes.grid["tp"] == sizes.grid["pp"] == 1 and dtypes.reduce == dtypes.kept
    return TOLERANCE["fp32" if dtypes.mixed and same else job.train.precision]


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
