"""Fits the constants of a framework to measured times, as calibration refits some of a cluster's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.predict.plans import Planned
from launcher.extras.calibration import refit

MOST = {"efficiency": 0.95, "kernels.moved": 1.0, "kernels.attention": 0.95, "overheads.exposed_tp": 1.0}
Timed = tuple[Planned, float]
"""A plan, and the measured seconds of its step."""


def fit(data: Sequence[Timed], start: Mapping[str, float], fixed: Mapping[str, float]) -> dict[str, float]:
    """Return the constants of ``start`` that predict ``data`` best; those in ``fixed`` do not change."""
    clusters = {id(plan.cluster): refit.changed(plan.cluster, fixed) for plan, _ in data}
    steps = [
        refit.MeasuredStep(plan.work, clusters[id(plan.cluster)], plan.row.precision, None, seconds)
        for plan, seconds in data
    ]
    return refit.fit(steps, start, {key: (0.0, most) for key, most in MOST.items()})
