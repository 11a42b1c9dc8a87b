"""How a plan reads the user's data set: notes, and refusals of data that cannot train correctly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.errors import Problem, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.user_class import Target
from launcher.plan.refusals import evaluation
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.precision import COMPUTE, DTYPE
from launcher.planner.rank_variable_reads import same_on_all_ranks
from launcher.planner.trial_samples import SPREAD, spread_samples

if TYPE_CHECKING:
    from launcher.data.source import Dataset

DATA_KEY = "data._target_"


def data_notes(job: Job, sizes: Sizes) -> list[Note]:
    """Returns notes on how the data set is read.

    Opens it, and reads some items more than once; raises ``RequestError``.
    """
    if not isinstance(job.data, Target):
        return []
    return [*_reading_notes(job, job.data, sizes), *_rounded(job)]


def _reading_notes(job: Job, settings: Target, sizes: Sizes) -> list[Note]:
    from launcher.data.torch_datasets.open import opened
    from launcher.data.torch_datasets.repeatable_items import unsteady, unsteady_source

    with same_on_all_ranks(DATA_KEY, settings.target, sizes.grid.size):
        one, again = (opened(settings, job.seed, job.security.allow) for _ in range(2))
        if one.reading == "shuffled":  # a Source, which is not read in epochs
            refuse([*unsteady_source(settings.target, one.train, again.train)])
            return []
        refuse([*unsteady(one, again)])
    refuse([*_too_few(one, job, sizes)])
    return [*_notes(one, settings)]


def _rounded(job: Job) -> Iterator[Note]:
    """Yields a note for each float input in which the compute dtype rounds a column of whole numbers.

    They may be ids, which a forward converts back: another row of the table would be trained.
    """
    compute = COMPUTE[job.train.precision]
    if compute == DTYPE[job.train.precision]:
        return
    from launcher.parallel.trace.tensor_specs import dtype_of

    for at, x in enumerate(spread_samples(job, SPREAD)):
        if not x.is_floating_point():
            continue
        columns = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(-1, 1)
        whole = columns[:, (columns == columns.round()).all(0)]
        rounded = whole.to(dtype_of(compute)).to(x.dtype)
        if (differ := whole != rounded).any():
            before, after = whole[differ][0], rounded[differ][0]
            text = f"input {at} has columns of whole numbers, and {job.train.precision} rounds them"
            cure = "if they are ids, pass them as an input of an integer dtype"
            yield Note(DATA_KEY, f"{text}, such as {before:.9g} to {after:.9g}: {cure}")


def _too_few(data: Dataset, job: Job, sizes: Sizes) -> Iterator[Problem]:
    """Refuses a data set with fewer samples than the run will read."""
    name = job.data.target if isinstance(job.data, Target) else ""
    need, have = sizes.steps * sizes.global_batch, len(data.train)
    if data.reading == "in order" and have < need and job.debug.overfit is None:
        steps = have // sizes.global_batch
        text = f"{sizes.steps}: steps of {sizes.global_batch} samples need {need}, but {name} has {have}"
        yield Problem("train.steps", text, f"train.steps={steps}" if steps else "")
    if not len(data.val):
        for who in evaluation.evaluated_by(job):
            text = f"{name} has no held-out samples; name them in data.val, or evaluate nothing"
            yield Problem(who if "." in who else f"steps.{who}", text)


def _notes(data: Dataset, settings: Target) -> Iterator[Note]:
    from launcher.data.torch_datasets.readers import IndexedStream

    if isinstance(data.train, IndexedStream):
        text = "a stream: each data-parallel rank reads all of it and keeps its own rows"
        on = "loads its state_dict" if data.train.place() is not None else "reads it again up to its place"
        yield Note(DATA_KEY, f"{settings.target} is {text}; a resumed run {on}")
    elif data.reading == "in epochs" and data.fraction:
        text = f"{len(data.val)} of {len(data.train) + len(data.val)} samples are held out, drawn once"
        default = "" if "val_fraction" in settings.arguments else f"null -> {data.fraction}: "
        yield Note("data.val_fraction", f"{default}{text}")
