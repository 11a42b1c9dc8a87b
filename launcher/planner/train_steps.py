"""Computes ``train.steps`` from ``train.epochs`` and the number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.optim import Constant
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Resolved
from launcher.plan.values.text import many
from launcher.user_errors import user_error

EPOCHS = "train.epochs"
UNENDING = 1 << 53
"""A data set of at least this length counts as endless."""


def steps_are_open(job: Job) -> bool:
    """Returns true if the number of steps has still to be computed."""
    return job.train.steps is None


def with_placeholder_steps(job: Job) -> Job:
    """Returns a placeholder until the data is opened.

    It has one step, at a constant rate, because other schedules need more steps.
    """
    return (
        _lasting(job, 1).model_copy(update={"schedule": Constant(name="constant")})
        if steps_are_open(job)
        else job
    )


def with_steps(resolved: Resolved) -> Resolved:
    """Computes ``train.steps`` from ``train.epochs``.

    Epochs follow each other without a gap: the last batch continues into the next epoch, so that every sample
    of the last epoch is trained on. Raises ``RequestError`` if the number of samples is unknown.
    """
    job, epochs = resolved.job, resolved.job.train.epochs
    if not steps_are_open(job) or epochs is None:
        return resolved
    n = _samples(job)
    n = n if job.debug.overfit is None else min(n, job.debug.overfit)
    # ceil; an empty data set of the user is refused when its first sample is requested
    steps = max(1, -(-epochs * n // job.train.batch_size))
    return replace(resolved, job=_lasting(job, steps), epoch_samples=n)


def steps_note(resolved: Resolved) -> Iterator[Note]:
    """Notes how the number of steps was computed."""
    train, samples = resolved.job.train, resolved.epoch_samples
    if samples is not None and train.epochs is not None:
        text = f"null -> {train.steps}: {many(train.epochs, 'epoch')} of {many(samples, 'sample')}"
        if rest := train.epochs * samples % train.batch_size:
            more = train.batch_size - rest
            of = "the next epoch" if more <= samples else "the next epochs"
            text += f"; the last step takes the last {rest} of them and {many(more, 'sample')} of {of}"
        yield Note("train.steps", text)


def _lasting(job: Job, steps: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})


def _samples(job: Job) -> int:
    """Returns the number of training samples in an epoch."""
    from launcher.data.open import open_data

    name = getattr(job.data, "target", "")
    try:
        n = len(open_data(job.data, seed=job.seed, allow=job.security.allow).train)
    except Exception as error:
        if isinstance(error, RequestError) or not name:
            raise
        raise _endless(job, f"the samples of {name} cannot be counted: {user_error(error)}") from None
    if n >= UNENDING:
        raise _endless(job, f"{name} has {n} samples, more than any training can read")
    return n


def _endless(job: Job, why: str) -> RequestError:
    """Returns an error without a cure, because nobody knows the intended number of steps."""
    text = f"{job.train.epochs}: {why}; set train.steps instead"
    return RequestError((Problem(EPOCHS, text),))
