"""Numbers that a model of the user's own is tried with: first samples of its data, its first weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.data.spec import input_specs, vocab
from launcher.job.schema.components import Target, foreign
from launcher.job.schema.job import Job
from launcher.plan.values.facts import TensorSpec
from launcher.planner.trace_model import ModelRead

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES = 8
"""Read of a data set of the user's own."""


def tried(job: Job, model: ModelRead) -> AbstractContextManager[None]:
    """What is followed meanwhile is tried with these numbers, where it looks at data."""
    if not (foreign(job.model) or isinstance(job.data, Target)) or model.initial is None:
        return nullcontext()
    from launcher.parallel.trace.sample_values import Trial, tried_with

    return tried_with(Trial(batches(samples(job)), model.initial))


def mixing(job: Job, model: ModelRead, specs: tuple[TensorSpec, ...]) -> bool | None:
    """Whether what a user's own class gives for a sample depends on the others; ``None``: not known."""
    if not isinstance(job.model, Target):
        return None
    from launcher.parallel.trace.mixing_samples import mixing
    from launcher.parallel.trace.model_facts import meta

    one = tuple(replace(s, shape=(1, *s.shape[1:])) for s in specs)
    if one not in model.mixing:
        with tried(job, model):
            model.mixing[one] = mixing(model.module, meta(one))
    return model.mixing[one]


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
    out = []
    for s in input_specs(job.data, SAMPLES, job.security.allow):
        if s.dtype.startswith("float"):
            out.append(torch.rand(s.shape, generator=stream))
        else:
            out.append(torch.randint(0, most, s.shape, generator=stream))
            out[-1][..., -1] = most - 1  # the largest is among them
    return tuple(out)


def batches(inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """All of them, and then one alone: its length is the longest, its ids are the only ones."""
    count = len(inputs[0]) if inputs else 0
    ones = dict.fromkeys(([0, count - 1]) if count > 1 else ())
    return inputs, *(tuple(t[at : at + 1] for t in inputs) for at in ones)
