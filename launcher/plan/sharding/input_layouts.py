"""``parallel.dataset_strategy`` over device matrices: the layouts in which operators find the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from launcher.errors import Problem, refuse
from launcher.job.schema.job import Job
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.sharding.written import layout_of
from launcher.plan.values.facts import TensorSpec

KEY = "parallel.dataset_strategy"


def input_layouts(job: Job, specs: Sequence[TensorSpec], ranks: int) -> tuple[TensorLayout, ...]:
    """One an input of the model. Raises ``RequestError``.

    Every rank reads whole samples and cuts its parts out of them; nothing is sent for that.
    """
    asked = job.parallel.dataset_strategy
    if asked == "full_batch":
        return tuple(TensorLayout.whole(len(s.shape), ranks) for s in specs)
    if asked == "data_parallel":
        return tuple(_samples(s, ranks) for s in specs)
    out, found = [], []
    for place, spec in enumerate(specs):
        got = layout_of(asked, place, spec.shape, ranks)
        if isinstance(got, str):
            found.append(Problem(KEY, got))
        else:
            out.append(got)
    refuse(found)
    return tuple(out)


def _samples(spec: TensorSpec, ranks: int) -> TensorLayout:
    ways = gcd(spec.shape[0], ranks) if spec.shape else 1
    if ways == 1:
        return TensorLayout.whole(len(spec.shape), ranks)
    matrix = (ways,) if ways == ranks else (ways, ranks // ways)
    return TensorLayout(matrix, ((0,), *((),) * (len(spec.shape) - 1)))
