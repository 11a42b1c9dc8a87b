"""Constants of a framework from measured times: coordinate descent on the logs of a few of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log

from benchmarks.predict.frameworks import changed
from benchmarks.predict.plans import Planned
from benchmarks.predict.values import step

START = 0.4
ROUNDS = 10
SCALE = 0.12
"""Errors beyond count less and less: some runs are slow for reasons of their own."""
MOST = {"efficiency": 0.95, "kernels.moved": 1.0, "kernels.attention": 0.95, "overheads.exposed_tp": 1.0}
Timed = tuple[Planned, float]
"""A plan, and the measured seconds of its step."""


def fit(data: Sequence[Timed], start: Mapping[str, float], fixed: Mapping[str, float]) -> dict[str, float]:
    """The constants of ``start`` that predict ``data`` best, with those in ``fixed`` as they are."""
    best = dict(start)
    width = dict.fromkeys(best, START)
    least = loss(data, {**fixed, **best})
    for _ in range(ROUNDS):
        for name in best:
            for sign in (1, -1):
                tried = {**best, name: min(best[name] * exp(sign * width[name]), MOST.get(name, 1e9))}
                cost = loss(data, {**fixed, **tried})
                if cost < least - 1e-9:
                    least, best = cost, tried
                    break
            else:
                width[name] /= 2
    return best


def loss(data: Sequence[Timed], constants: Mapping[str, float]) -> float:
    """Of Cauchy, of the logs of predicted over measured."""
    clusters = {id(plan.cluster): changed(plan.cluster, constants) for plan, _ in data}
    logs = (log(step(plan, clusters[id(plan.cluster)]).seconds / seconds) for plan, seconds in data)
    return sum(log(1 + (x / SCALE) ** 2) for x in logs) / len(data)
