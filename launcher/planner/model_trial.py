"""Numbers that a model of the user's own is tried with: first samples of its data, its first weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from launcher.data.spec import input_specs, vocab
from launcher.job.schema.components import Target, foreign
from launcher.job.schema.job import Job
from launcher.planner.trace_model import ModelRead

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES = 8
"""Read of a data set of the user's own."""


def tried(job: Job, model: ModelRead) -> AbstractContextManager[None]:
    """What is followed meanwhile is tried with these numbers, where it looks at data."""
    if not foreign(job.model) or model.initial is None:
        return nullcontext()
    from launcher.parallel.trace.sample_values import Trial, tried_with

    return tried_with(Trial(batches(samples(job)), model.initial))


def samples(job: Job) -> tuple[Tensor, ...]:
    """The first inputs of the training data; of data of ours, which is not read to plan, drawn ones."""
    import numpy as np
    import torch

    if isinstance(job.data, Target):
        from launcher.data.open import open_data

        source = open_data(job.data, seed=job.seed, allow=job.security.allow).train
        return tuple(source.inputs(np.arange(min(SAMPLES, len(source)))))

    stream = torch.Generator().manual_seed(0)
    most = vocab(job.data) or 2
    return tuple(
        torch.rand(s.shape, generator=stream)
        if s.dtype.startswith("float")
        else torch.randint(0, most, s.shape, generator=stream)
        for s in input_specs(job.data, SAMPLES, job.security.allow)
    )


def batches(inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """All of them, and then one alone: its length is the longest, its ids are the only ones."""
    count = len(inputs[0]) if inputs else 0
    ones = dict.fromkeys(([0, count - 1]) if count > 1 else ())
    return inputs, *(tuple(t[at : at + 1] for t in inputs) for at in ones)
