"""A few constants of clusters from measured steps: coordinate descent on their logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import mean

from launcher.job.schema.cluster import Cluster
from launcher.plan.prediction.prediction import predict
from launcher.plan.prediction.speeds import speeds_of
from launcher.plan.prediction.step_work import StepWork

START = 0.4
ROUNDS = 10
SCALE = 0.12
"""Errors beyond count less and less: some runs are slow for reasons of their own."""
FINE = 1e-3
"""Of a constant: nobody measures it better."""
SHARES = dict.fromkeys(("efficiency", "kernels.attention", "kernels.memory", "kernels.moved"), 1.0)
"""The most that a constant may be."""

CANDIDATES = (
    "efficiency",
    "memory_gb_per_s",
    "kernels.launch_us",
    "links.inside.latency_us",
    "links.inside.gb_per_s",
    "links.between.latency_us",
    "links.between.gb_per_s",
    "overheads.slot_ms",
    "overheads.step_ms",
)
"""What differs most from one machine to the next that has the same devices."""
MOST = 5
"""Constants that are fitted to a few layouts."""
LEAST = 1e-3
"""Seconds hang on a constant if with half of it those of a step are another by more than this share."""
TRUST = log(4)
"""A constant that is four times what it was counts as much as one layout that is predicted 16 % off."""
FAR = 4
"""No constant becomes so many times what it was, or so small a part of it."""


@dataclass(frozen=True)
class MeasuredStep:
    """``seconds`` of a step on ``cluster``; so many ranks ``per_node``, or one for each device."""

    work: StepWork
    cluster: Cluster
    precision: str
    per_node: int | None
    seconds: float

    def on(self, cluster: Cluster) -> float:
        """The seconds that are predicted on another one."""
        speeds = speeds_of(cluster, self.precision, self.per_node)
        assert speeds is not None
        return predict(self.work, speeds).seconds


@dataclass(frozen=True)
class Refit:
    """``fitted``: what each of these constants was, and is in ``cluster``; ``before`` and ``after``: seconds
    that are predicted of each measured step.
    """

    cluster: Cluster
    fitted: Mapping[str, tuple[float, float]]
    before: tuple[float, ...]
    after: tuple[float, ...]


def refit(steps: Sequence[MeasuredStep]) -> Refit:
    """The cluster of all ``steps`` with those of its constants fitted that they can tell.

    At most ``MOST`` of ``CANDIDATES``. A constant that no step hangs on stays as it is, and so does one that
    is 0. Few measurements cannot send a constant far: the square of the log of how many times its start it
    is counts beside the errors (``TRUST``), and there it ends (``FAR``). So of two sets of constants that
    fit alike the one nearer to the start is found, and a layout that was slow for reasons of its own moves
    little. Constants have three digits, as in the file that they go into.
    """
    cluster = steps[0].cluster
    start = {key: value(cluster, key) for key in _telling(steps, cluster)}
    found = _near(steps, start)
    rounded = {key: float(f"{found[key]:.3g}") for key in start}
    moved = {key: new for key, new in rounded.items() if abs(log(found[key] / start[key])) > FINE}
    new = changed(cluster, moved)
    return Refit(
        new,
        fitted={key: (start[key], moved[key]) for key in moved},
        before=tuple(step.on(cluster) for step in steps),
        after=tuple(step.on(new) for step in steps),
    )


def error(predicted: Sequence[float], steps: Sequence[MeasuredStep]) -> float:
    """Of the measured seconds, on the mean."""
    return mean(abs(p / step.seconds - 1) for p, step in zip(predicted, steps, strict=True))


def fit(
    steps: Sequence[MeasuredStep],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    *,
    rounds: int = ROUNDS,
    trust: float | None = None,
) -> dict[str, float]:
    """The constants of ``start`` that predict ``steps`` best, whatever the clusters of these say of them.

    ``bounds``: of some of them; ``trust``: how far in logs one may go for the price of one step's error.
    """

    def cost(constants: Mapping[str, float]) -> float:
        return loss(steps, constants) + (_drift(constants, start, trust) / len(steps) if trust else 0.0)

    best = dict(start)
    width = dict.fromkeys(best, START)
    least = cost(best)
    for _ in range(rounds):
        for name in best:
            for sign in (1, -1):
                low, high = bounds.get(name, (0.0, inf))
                tried = {**best, name: max(low, min(best[name] * exp(sign * width[name]), high))}
                tried_cost = cost(tried)
                if tried_cost < least - 1e-9:
                    least, best = tried_cost, tried
                    break
            else:
                width[name] /= 2
        if all(w < FINE for w in width.values()):
            break
    return best


def loss(steps: Sequence[MeasuredStep], constants: Mapping[str, float]) -> float:
    """Of Cauchy, of the logs of predicted over measured."""
    clusters = {id(step.cluster): changed(step.cluster, constants) for step in steps}
    logs = (log(step.on(clusters[id(step.cluster)]) / step.seconds) for step in steps)
    return sum(log(1 + (x / SCALE) ** 2) for x in logs) / len(steps)


def _drift(constants: Mapping[str, float], start: Mapping[str, float], trust: float) -> float:
    return sum((log(constants[key] / start[key]) / trust) ** 2 for key in start)


def _telling(steps: Sequence[MeasuredStep], cluster: Cluster) -> list[str]:
    """Those that seconds hang on; of more than ``MOST`` those that go farthest when all may go."""
    before = [step.on(cluster) for step in steps]
    start = {}
    for key in CANDIDATES:
        half = changed(cluster, {key: value(cluster, key) / 2})
        logs = (log(step.on(half) / seconds) for step, seconds in zip(steps, before, strict=True))
        if max(map(abs, logs)) > LEAST:
            start[key] = value(cluster, key)
    if len(start) <= MOST:
        return list(start)
    found = _near(steps, start)
    return sorted(start, key=lambda key: -abs(log(found[key] / start[key])))[:MOST]


def _near(steps: Sequence[MeasuredStep], start: Mapping[str, float]) -> dict[str, float]:
    bounds = {key: (old / FAR, min(old * FAR, SHARES.get(key, inf))) for key, old in start.items()}
    return fit(steps, start, bounds, rounds=3 * ROUNDS, trust=TRUST)


def value(cluster: Cluster, key: str) -> float:
    """Of a dotted key."""
    at: object = cluster
    for name in key.split("."):
        at = getattr(at, name)
    assert isinstance(at, float), key
    return at


def changed(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """With values of dotted keys in their places."""
    data = cluster.model_dump()
    for path, new in constants.items():
        *around, last = path.split(".")
        at = data
        for key in around:
            at = at[key]
        at[last] = new
    return Cluster.model_validate(data)
