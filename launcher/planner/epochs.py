"""``train.epochs``: the number of optimizer steps, which is known once the data is opened."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem, RequestError, of_users
from launcher.job.schema.job import Job
from launcher.job.schema.schedules import Constant
from launcher.plan.partition.sizes import Note
from launcher.plan.values.text import many

KEY = "train.epochs"
UNENDING = 1 << 53
"""A length from which on a data set counts as endless."""


class EpochSteps(int):
    """A ``train.steps`` that was computed from epochs of ``samples`` samples."""

    samples = 0


def asked(job: Job) -> bool:
    """Whether the number of steps has still to be computed."""
    return job.train.steps is None


def supposed(job: Job) -> Job:
    """A placeholder until the data is opened: one step at a constant rate, which one step is enough for."""
    return _lasting(job, 1).model_copy(update={"schedule": Constant(name="constant")}) if asked(job) else job


def with_steps(job: Job) -> Job:
    """Returns ``job`` with ``train.steps`` computed from ``train.epochs``.

    Epochs follow each other without a gap: the last batch continues into the next epoch, so that every sample
    of the last epoch is trained on. Raises ``RequestError`` if the number of samples is unknown.
    """
    epochs = job.train.epochs
    if not asked(job) or epochs is None:
        return job
    n = _samples(job)
    n = n if job.debug.overfit is None else min(n, job.debug.overfit)
    # ceil; an empty data set of the user is refused when its first sample is requested
    steps = EpochSteps(max(1, -(-epochs * n // job.train.batch_size)))
    steps.samples = n
    return _lasting(job, steps)


def note(job: Job) -> Iterator[Note]:
    """Notes how the number of steps was computed."""
    steps, epochs = job.train.steps, job.train.epochs
    if isinstance(steps, EpochSteps) and epochs is not None:
        text = f"null -> {steps}: {many(epochs, 'epoch')} of {many(steps.samples, 'sample')}"
        if rest := epochs * steps.samples % job.train.batch_size:
            text += f"; the last step has {rest} of them, and the first ones of the epoch that would follow"
        yield Note("train.steps", text)


def _lasting(job: Job, steps: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})


def _samples(job: Job) -> int:
    """The number of training samples in an epoch."""
    from launcher.data.open import open_data

    name = getattr(job.data, "target", "")
    try:
        n = len(open_data(job.data, seed=job.seed, allow=job.security.allow).train)
    except Exception as error:
        if isinstance(error, RequestError) or not name:
            raise
        raise _endless(job, f"the samples of {name} cannot be counted: {of_users(error)}") from None
    if n >= UNENDING:
        raise _endless(job, f"{name} has {n} samples, more than any training can read")
    return n


def _endless(job: Job, why: str) -> RequestError:
    """An error without a cure: the intended number of steps is unknown too."""
    text = f"{job.train.epochs}: {why}; say how long to train in train.steps"
    return RequestError((Problem(KEY, text),))
