"""``parallel.dataset_strategy`` over device matrices: the layouts in which the model gets its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from shlex import quote
from typing import Any

from launcher.errors import Problem, refuse
from launcher.job.schema.job import Job
from launcher.plan.settings.dataset_strategy import written
from launcher.plan.sharding.strategies.tensor_dims import (
    UnfitError,
    device_matrix,
    named_axes,
    named_layout,
    nearest_slices,
    over_ranks,
    sliced_layout,
    text,
)
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.values.facts import TensorSpec

KEY = "parallel.dataset_strategy"


def input_layouts(job: Job, specs: Sequence[TensorSpec], ranks: int) -> tuple[TensorLayout, ...]:
    """Returns the layout of each input of the model. Raises ``RequestError`` if one does not fit.

    Every rank reads full samples and cuts its parts out of them, without communication.
    """
    asked = job.parallel.dataset_strategy
    if asked == "full_batch":
        return tuple(TensorLayout.whole(len(s.shape), ranks) for s in specs)
    if asked == "data_parallel":
        return tuple(_samples(s, ranks) for s in specs)
    problems: list[Problem] = []
    out = []
    for place, spec in enumerate(specs):
        try:
            out.append(_layout(asked, place, spec.shape, ranks))
        except UnfitError as error:
            problems.append(Problem(KEY, str(error), _cure(asked, place, spec.shape, ranks)))
    refuse([*problems, *_target(asked, len(specs), ranks)])
    return tuple(out)


def _layout(asked: Any, place: int, shape: tuple[int, ...], ranks: int) -> TensorLayout:
    where = f"input {place}"
    if not isinstance(asked, Mapping):
        return sliced_layout(where, asked[place], shape, ranks)
    axes = device_matrix(asked["matrix"], asked["axes"], ranks)
    return named_layout(where, asked["in"][place], shape, axes)


def _target(asked: Any, place: int, ranks: int) -> list[Problem]:
    """Returns a problem if the entry of the target is malformed.

    Targets are cut as the loss takes them, whatever the entry says.
    """
    try:
        if isinstance(asked, Mapping):
            dims = asked["in"][place]
            named_axes("target", dims, dims, device_matrix(asked["matrix"], asked["axes"], ranks))
        else:
            over_ranks(f"target: {text(asked[place])}: ", asked[place], ranks)
    except UnfitError as error:
        return [Problem(KEY, str(error))]
    return []


def _cure(asked: Any, place: int, shape: tuple[int, ...], ranks: int) -> str:
    """The override with the most slices that fit; "" if these cut nothing, or for named axes."""
    if isinstance(asked, Mapping):
        return ""
    nearest = tuple(nearest_slices(asked[place], shape, ranks))
    if prod(nearest) == 1:  # the user did not mean to cut nothing
        return ""
    return quote(f"{KEY}={written((*asked[:place], nearest, *asked[place + 1 :]))}")


def _samples(spec: TensorSpec, ranks: int) -> TensorLayout:
    ways = gcd(spec.shape[0], ranks) if spec.shape else 1
    if ways == 1:
        return TensorLayout.whole(len(spec.shape), ranks)
    matrix = (ways,) if ways == ranks else (ways, ranks // ways)
    return TensorLayout(matrix, ((0,), *((),) * (len(spec.shape) - 1)))
