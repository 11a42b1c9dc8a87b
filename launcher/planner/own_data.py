"""Notes and refusals about the user's torch data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.errors import Problem, refuse
from launcher.job.schema.components import Target
from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Note, Sizes
from launcher.plan.refusals import evaluation

if TYPE_CHECKING:
    from launcher.data.source import Dataset

KEY = "data._target_"


def looked_at(job: Job, sizes: Sizes) -> list[Note]:
    """Notes on how the data set is read.

    Opens it, and reads some items more than once; raises ``RequestError``.
    """
    if not isinstance(job.data, Target):
        return []
    from launcher.data.torch_datasets.open import opened
    from launcher.data.torch_datasets.probe import unsteady

    one = opened(job.data, job.seed, job.security.allow)
    if one.reading == "shuffled":  # a Source defines its own order
        return []
    refuse([*unsteady(one, opened(job.data, job.seed, job.security.allow))])
    refuse([*_too_few(one, job, sizes)])
    return [*_notes(one, job.data)]


def _too_few(data: Dataset, job: Job, sizes: Sizes) -> Iterator[Problem]:
    """Refuses a data set with fewer samples than the run will read."""
    name = job.data.target if isinstance(job.data, Target) else ""
    need, have = sizes.steps * sizes.global_batch, len(data.train)
    if data.reading == "in order" and have < need and job.debug.overfit is None:
        steps = have // sizes.global_batch
        text = f"{sizes.steps}: steps of {sizes.global_batch} samples are {need}, and {name} has {have}"
        yield Problem("train.steps", text, f"train.steps={steps}" if steps else "")
    if not len(data.val):
        for who in evaluation.asked(job):
            text = f"{name} offers no held-out samples; name them as data.val, or evaluate nothing"
            yield Problem(who if "." in who else f"steps.{who}", text)


def _notes(data: Dataset, settings: Target) -> Iterator[Note]:
    from launcher.data.torch_datasets.stream import Stream

    if isinstance(data.train, Stream):
        text = "a stream: each data-parallel rank reads all of it and keeps its own rows"
        on = "begins where its state_dict was" if data.train.place() is not None else "reads on to its place"
        yield Note(KEY, f"{settings.target} is {text}; a run that goes on {on}")
    elif data.reading == "in epochs" and data.fraction:
        text = f"{len(data.val)} of {len(data.train) + len(data.val)} samples are held out, drawn once"
        default = "" if "val_fraction" in settings.arguments else f"null -> {data.fraction}: "
        yield Note("data.val_fraction", f"{default}{text}")
