"""``train.epochs``: how many optimizer steps they are, which the data says once it is opened."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem, RequestError, of_users
from launcher.job.schema.job import Job
from launcher.job.schema.schedules import Constant
from launcher.plan.partition.sizes import Note
from launcher.plan.values.text import many

KEY = "train.epochs"
UNENDING = 1 << 53
"""A number of samples that stands for no end."""


class EpochSteps(int):
    """A ``train.steps`` that was worked out, of epochs of so many ``samples``."""

    samples = 0


def asked(job: Job) -> bool:
    """Whether the steps are not known yet."""
    return job.train.steps is None


def supposed(job: Job) -> Job:
    """As long as nobody has opened the data: a step, at a rate that so few are enough for."""
    return _lasting(job, 1).model_copy(update={"schedule": Constant(name="constant")}) if asked(job) else job


def with_steps(job: Job) -> Job:
    """``job`` with ``train.steps`` beside ``train.epochs``.

    Epoch follows epoch without a gap: the last batch goes on into the next one, so that every sample of the
    last epoch is trained on. Raises ``RequestError`` where nobody knows how many there are.
    """
    epochs = job.train.epochs
    if not asked(job) or epochs is None:
        return job
    n = _samples(job)
    n = n if job.debug.overfit is None else min(n, job.debug.overfit)
    # ceil; a class of the user's own without any samples is refused by whoever asks for the first
    steps = EpochSteps(max(1, -(-epochs * n // job.train.batch_size)))
    steps.samples = n
    return _lasting(job, steps)


def note(job: Job) -> Iterator[Note]:
    """What the steps come of."""
    steps, epochs = job.train.steps, job.train.epochs
    if isinstance(steps, EpochSteps) and epochs is not None:
        text = f"null -> {steps}: {many(epochs, 'epoch')} of {many(steps.samples, 'sample')}"
        if rest := epochs * steps.samples % job.train.batch_size:
            text += f"; the last step has {rest} of them, and the first ones of the epoch that would follow"
        yield Note("train.steps", text)


def _lasting(job: Job, steps: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})


def _samples(job: Job) -> int:
    """Those that are trained on in an epoch."""
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
    """There is no cure: how many steps are meant is not known either."""
    text = f"{job.train.epochs}: {why}; say how long to train in train.steps"
    return RequestError((Problem(KEY, text),))
