"""Tries a model on a few samples of its data while it is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.data.spec import input_specs, vocab
from launcher.errors import RunError
from launcher.job.schema.components import foreign
from launcher.job.schema.job import Job
from launcher.job.schema.user_class import Target
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner.rank_variable_reads import environment_reads
from launcher.planner.trace_model import ModelRead, TracedForward

if TYPE_CHECKING:
    from torch import Tensor

    from launcher.data.source import Source
    from launcher.parallel.trace.clock_and_host_reads import OutsideReads
    from launcher.parallel.trace.identity_of_inputs import InputIdentity

SAMPLES = 8
"""The number of samples to read from a user's data set."""
SPREAD = 64
"""At most so many samples from all over the data set are tried."""
EXAMINED = 512
"""So many samples are read to find unusual ones, if a sample is small."""
SMALL = 1 << 12
"""A small sample has at most so many numbers."""


@contextmanager
def try_samples(
    job: Job, model: ModelRead, specs: tuple[TensorSpec, ...]
) -> Iterator[Callable[[TracedForward], TracedForward]]:
    """Tries data-dependent code with real samples while tracing, and records reads of the environment.

    Yields a function that adds to a traced forward whether samples of a batch depend on one another.
    """
    if not _is_tried(job, model):
        yield lambda seen: seen
        return
    from launcher.parallel.trace.mixing_samples import numbers_if_too_large
    from launcher.parallel.trace.torch_distributed_reads import world_reads

    with environment_reads(), sample_values(job, model):
        with world_reads(model.late_world.setdefault):
            mixing, reads = _mixing(job, model, specs), _outside(job, model, specs)
            asks = _identity(job, model, specs)
        untried = None
        if isinstance(job.model, Target):
            untried = numbers_if_too_large(model.module) or (0 if mixing is None else None)

        def finished(seen: TracedForward) -> TracedForward:
            known = {query for _, query in seen.graph.effects.world}
            late = (query for query in (*model.late_world, *reads.places) if query not in known)
            world = (*seen.graph.effects.world, *(("", query) for query in late))
            effects = replace(
                seen.graph.effects,
                mixing=mixing,
                untested_elements=untried,
                world=world,
                clocks=reads.clocks,
                differ_if_copied=asks.sent,
                differ_if_contiguous=asks.contiguous,
                differ_if_separate=asks.apart,
                differ_if_gathered=asks.gathered,
                need_other_modules=asks.alone,
            )
            return replace(seen, graph=replace(seen.graph, effects=effects))

        yield finished


def _is_tried(job: Job, model: ModelRead) -> bool:
    return (foreign(job.model) or isinstance(job.data, Target)) and model.initial is not None


@contextmanager
def sample_values(job: Job, model: ModelRead) -> Iterator[None]:
    """Gives code in the block that needs values those of a few samples, if the model is tried on any."""
    from launcher.parallel.trace.sample_values import TrialValues, using_trial_values

    if not _is_tried(job, model) or model.initial is None:
        yield
        return
    with using_trial_values(TrialValues(batches(samples(job)), model.initial, partial(spread_samples, job))):
        yield


def _mixing(job: Job, model: ModelRead, specs: tuple[TensorSpec, ...]) -> str | None:
    """Returns what depends on other samples of a batch in a user's model, "" if nothing does.

    ``None``: untried.
    """
    if not isinstance(job.model, Target):
        return None
    from launcher.parallel.trace.mixing_samples import mixing
    from launcher.parallel.trace.tensor_specs import meta

    one = tuple(replace(s, shape=(1, *s.shape[1:])) for s in specs)
    if one not in model.mixing:
        model.mixing[one] = mixing(model.module, meta(one), job.train.batch_size)
    return model.mixing[one]


def _outside(job: Job, model: ModelRead, specs: tuple[TensorSpec, ...]) -> OutsideReads:
    """Returns the functions outside of a user's model that its output depends on."""
    from launcher.parallel.trace.clock_and_host_reads import OutsideReads, outside_reads
    from launcher.parallel.trace.tensor_specs import meta

    if not isinstance(job.model, Target):
        return OutsideReads()
    one = tuple(replace(s, shape=(1, *s.shape[1:])) for s in specs)
    if one not in model.outside:
        model.outside[one] = outside_reads(model.module, meta(one))
    return model.outside[one]


def _identity(job: Job, model: ModelRead, specs: tuple[TensorSpec, ...]) -> InputIdentity:
    """Returns the modules of a user's model that depend on more than the numbers of their inputs."""
    from launcher.parallel.trace.identity_of_inputs import InputIdentity, input_identity
    from launcher.parallel.trace.tensor_specs import meta

    if not isinstance(job.model, Target):
        return InputIdentity()
    one = tuple(replace(s, shape=(1, *s.shape[1:])) for s in specs)
    if one not in model.identity:
        model.identity[one] = input_identity(model.module, meta(one))
    return model.identity[one]


def samples(job: Job) -> tuple[Tensor, ...]:
    """Returns the first inputs of the training data.

    For built-in data, which planning does not read, they are random.
    """
    import numpy as np
    import torch

    if isinstance(job.data, Target):
        from launcher.data.open import open_data

        source = open_data(job.data, seed=job.seed, allow=job.security.allow).train
        count = min(SAMPLES, len(source))
        while True:
            try:
                return tuple(source.inputs(np.arange(count)))
            except RunError:  # a run that reads a bad sample reports its number
                if count <= 1:
                    raise
                count //= 2

    stream = torch.Generator().manual_seed(0)
    most = vocab(job.data) or 2
    out = []
    for s in input_specs(job.data, SAMPLES, job.security.allow):
        if s.dtype.startswith("float"):
            out.append(torch.rand(s.shape, generator=stream))
        elif out:  # the document numbers of the tokens, ascending from 0
            out.append(torch.randint(0, 2, s.shape, generator=stream).cumsum(-1))
            out[-1] -= out[-1][..., :1].clone()
        else:
            out.append(torch.randint(0, most, s.shape, generator=stream))
            out[-1][..., -1] = most - 1  # include the largest id
    return tuple(out)


def spread_samples(job: Job, count: int) -> tuple[Tensor, ...]:
    """Returns inputs from all over the training data; none for data that is read in order, or cannot be.

    There are ``count``, or as many as may be read. Unusual samples come first.
    """
    if not isinstance(job.data, Target):
        return ()
    from launcher.data.open import open_data
    from launcher.data.torch_datasets.readers import IndexedStream
    from launcher.planner.unusual_samples import unusual_first

    source = open_data(job.data, seed=job.seed, allow=job.security.allow).train
    if isinstance(source, IndexedStream):
        return ()
    few = _evenly(source, min(count, SPREAD))
    if not few or not len(few[0]) or sum(x[0].numel() for x in few) > SMALL:
        return few
    many = _evenly(source, EXAMINED) or few
    places = unusual_first(many, min(count, SPREAD, len(many[0])))
    return tuple(x[places] for x in many)


def _evenly(source: Source, count: int) -> tuple[Tensor, ...]:
    """Returns the inputs of ``count`` samples from all over ``source``; none if one of them is bad."""
    import numpy as np

    places = np.linspace(0, len(source) - 1, min(count, len(source))).astype(np.int64)
    with suppress(RunError):  # a run that reads a bad sample reports its number
        return tuple(source.inputs(places))
    return ()


def batches(inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Returns all samples as one batch, then the first and the last one as a batch each.

    The small batches have their own length and ids.
    """
    count = len(inputs[0]) if inputs else 0
    ones = dict.fromkeys(([0, count - 1]) if count > 1 else ())
    return inputs, *(tuple(t[at : at + 1] for t in inputs) for at in ones)
