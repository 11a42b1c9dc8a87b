"""Fits constants, and writes conf/cluster files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import exp, inf, log
from statistics import mean

from launcher.extras.calibration.constants import FittedConstant, MeasuredMachine, cluster
from launcher.job.schema.cluster import Cluster
from launcher.plan.time.prediction import predict
from launcher.plan.time.speeds import speeds_of
from launcher.plan.time.step_work import StepWork

START = 0.4
ROUNDS = 10
SCALE = 0.12
"""Errors beyond this count less and less: some runs are slow for reasons that no constant explains."""
FINE = 1e-3
"""The relative precision of a fitted constant: no measurement is better."""
SHARES = dict.fromkeys(("efficiency", "kernels.attention", "kernels.memory", "kernels.moved"), 1.0)
"""The maximum of each constant that is a fraction."""

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
"""The constants that differ most between machines with the same devices."""
MOST_CONSTANTS = 5
"""The most constants that are fitted to a few layouts."""
LEAST_EFFECT = 1e-3
"""Steps depend on a constant if halving it changes the seconds of one of them by more than this share."""
TRUST = log(4)
"""A constant that changes by a factor of four costs as much as one layout with a prediction error of 16 %."""
FAR = 4
"""The largest factor by which a constant may grow or shrink."""


@dataclass(frozen=True)
class MeasuredStep:
    """The measured seconds of a step on ``cluster``; ``per_node``: its ranks; ``None``: one per device."""

    work: StepWork
    cluster: Cluster
    precision: str
    per_node: int | None
    seconds: float

    def on(self, cluster: Cluster) -> float:
        """Returns the predicted seconds of the step on another cluster."""
        speeds = speeds_of(cluster, self.precision, self.per_node)
        assert speeds is not None
        return predict(self.work, speeds).seconds


@dataclass(frozen=True)
class Refit:
    """A cluster with refitted constants.

    ``fitted``: the old and the new value of each constant that changed. ``before`` and ``after``: the
    predicted seconds of each measured step.
    """

    cluster: Cluster
    fitted: Mapping[str, tuple[float, float]]
    before: tuple[float, ...]
    after: tuple[float, ...]


def refit(steps: Sequence[MeasuredStep]) -> Refit:
    """Fits the constants that ``steps`` can determine, and returns their cluster with the new values.

    At most ``MOST_CONSTANTS`` of ``CANDIDATES`` are fitted. A constant on which no step depends stays the
    same, and so does one that is 0. Few measurements cannot move a constant far: the squared log of its ratio
    to the start value is added to the errors (``TRUST``), and the ratio is bounded (``FAR``). So of two sets
    of constants that fit equally well the fit finds the one closer to the start, and a layout that was slow
    for other reasons changes little. Constants have three digits, as in their file.
    """
    cluster = steps[0].cluster
    start = {key: value(cluster, key) for key in _telling(steps, cluster)}
    fitted = _near(steps, start)
    rounded = {key: float(f"{fitted[key]:.3g}") for key in start}
    moved = {key: new for key, new in rounded.items() if abs(log(fitted[key] / start[key])) > FINE}
    new = changed(cluster, moved)
    return Refit(
        new,
        fitted={key: (start[key], moved[key]) for key in moved},
        before=tuple(step.on(cluster) for step in steps),
        after=tuple(step.on(new) for step in steps),
    )


def error(predicted: Sequence[float], steps: Sequence[MeasuredStep]) -> float:
    """Returns the mean relative error of the predicted seconds."""
    return mean(abs(p / step.seconds - 1) for p, step in zip(predicted, steps, strict=True))


def fit(
    steps: Sequence[MeasuredStep],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    *,
    rounds: int = ROUNDS,
    trust: float | None = None,
) -> dict[str, float]:
    """Returns values for the constants of ``start`` that predict ``steps`` best.

    Args:
        steps: the measured steps; the values of these constants in their clusters are ignored.
        start: the constants with their start values.
        bounds: least and most of some of them.
        rounds: the most rounds of coordinate descent.
        trust: the change in logs that costs as much as one step's error; ``None``: changes cost nothing.
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
    """Returns the mean Cauchy loss of the logs of predicted over measured seconds."""
    clusters = {id(step.cluster): changed(step.cluster, constants) for step in steps}
    logs = (log(step.on(clusters[id(step.cluster)]) / step.seconds) for step in steps)
    return sum(log(1 + (x / SCALE) ** 2) for x in logs) / len(steps)


def _drift(constants: Mapping[str, float], start: Mapping[str, float], trust: float) -> float:
    return sum((log(constants[key] / start[key]) / trust) ** 2 for key in start)


def _telling(steps: Sequence[MeasuredStep], cluster: Cluster) -> list[str]:
    """Returns the constants on which steps depend.

    If there are more than ``MOST_CONSTANTS``, these are the ones that change most when all are fitted.
    """
    before = [step.on(cluster) for step in steps]
    start = {}
    for key in CANDIDATES:
        half = changed(cluster, {key: value(cluster, key) / 2})
        logs = (log(step.on(half) / seconds) for step, seconds in zip(steps, before, strict=True))
        if max(map(abs, logs)) > LEAST_EFFECT:
            start[key] = value(cluster, key)
    if len(start) <= MOST_CONSTANTS:
        return list(start)
    fitted = _near(steps, start)
    return sorted(start, key=lambda key: -abs(log(fitted[key] / start[key])))[:MOST_CONSTANTS]


def _near(steps: Sequence[MeasuredStep], start: Mapping[str, float]) -> dict[str, float]:
    bounds = {key: (old / FAR, min(old * FAR, SHARES.get(key, inf))) for key, old in start.items()}
    return fit(steps, start, bounds, rounds=3 * ROUNDS, trust=TRUST)


def value(cluster: Cluster, key: str) -> float:
    """Returns the value of a dotted key."""
    at: object = cluster
    for name in key.split("."):
        at = getattr(at, name)
    assert isinstance(at, float), key
    return at


def changed(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """Returns ``cluster`` with new values of dotted keys."""
    data = cluster.model_dump()
    for path, new in constants.items():
        *around, last = path.split(".")
        at = data
        for key in around:
            at = at[key]
        at[last] = new
    return Cluster.model_validate(data)


SHARED = "the cores that compute also send"
GROUPS = ("kernels", "overheads")
TOGETHER = ("tflops", "links.inside", "links.between")
HOW = {
    "tflops": "the fastest products",
    "efficiency": "fitted to products of several sizes",
    "memory_gb_per_s": "a large copy, or other kernels if they are faster",
    "links.inside": "collectives; a message",
    "links.between": "the same, between nodes",
    "kernels.small": "fitted to products of several sizes",
    "kernels.attention": "causal attention, forward and backward",
    "kernels.memory": "norms, activations, rotations, sums and a loss",
    "kernels.launch_us": "a block of tiny tensors, by its kernels",
    "kernels.alone": "a block on all cores at once (the slowest counts), and on one",
    "overheads.scatter": "reduce-scatters, compared with the other collectives",
    "overheads.exposed": "gradients sent during a matrix product",
    "overheads.exposed_sums": "the same",
    "overheads.exposed_tp": "a product and a collective in turns: ranks wait for the slowest",
    "overheads.slot_ms": "the unexplained part of a tiny pipeline step, with the spread of its slot",
    "overheads.step_ms": "the unexplained part of a tiny step on replicas, with the spread of the step",
}


ALONE = (
    "memory_gb",
    "devices_per_node",
    "cores_per_node",
    "efficiency",
    "memory_gb_per_s",
)
"""Keys with a single number, which come first in a file. Maps on one line follow, then the groups."""


def cluster_file(
    constants: Sequence[FittedConstant], machine: MeasuredMachine, heads: Sequence[str], nodes: int
) -> str:
    """Returns the file of a calibrated cluster; ``heads``: comments on when and where it was measured."""
    values = {c.key: float(number(c.value)) for c in constants}
    calibrated = cluster(values, replace(machine, memory_gb=float(f"{machine.memory_gb:.3g}")))
    return cluster_text(calibrated, heads, dict(_comments(constants, machine, nodes)))


def _comments(
    constants: Sequence[FittedConstant], machine: MeasuredMachine, nodes: int
) -> Iterator[tuple[str, str]]:
    shared = machine.cores is not None
    yield "memory_gb", f"of the machine, shared by {machine.per_node} ranks" if shared else "of a device"
    yield "devices_per_node", "ranks per node of the run that measured"
    yield "cores_per_node", "cores that ranks may use, divided by the threads of a rank"
    for c in constants:
        hidden = "exposed" in c.key and shared
        yield c.key, SHARED if hidden else f"{HOW.get(c.key)}; spread {c.spread:.0%}"
    for above in TOGETHER:
        spreads = ", ".join(f"{c.spread:.0%}" for c in constants if c.key.startswith(f"{above}."))
        yield above, f"{HOW[above]}; spreads {spreads}"
    if nodes == 1:
        yield "links.between", "as inside: there is one node"


def cluster_text(cluster: Cluster, heads: Sequence[str], comments: Mapping[str, str]) -> str:
    """Returns a file that is read as ``cluster``.

    ``heads`` are comments at its top, ``comments`` those of keys. Overheads and kernel settings that have the
    values of ``unknown`` are left out, unless they have a comment.
    """
    return "".join(f"{line}\n" for line in _lines(cluster, heads, comments))


def _lines(cluster: Cluster, heads: Sequence[str], comments: Mapping[str, str]) -> Iterator[str]:
    def line(key: str, value: str) -> str:
        comment = f"  # {comments[key]}" if key in comments else ""
        return f"{_last(key)}: {value}{comment}"

    data, plain = cluster.model_dump(exclude_none=True), Cluster().model_dump()
    yield from (f"# {head}" for head in heads)
    yield from ("defaults:", "  - unknown", "  - _self_", f"name: {json.dumps(cluster.name)}")
    yield from (line(key, exact(data[key])) for key in ALONE if key in data)
    yield line("tflops", _map(data["tflops"]))
    yield "links:"
    yield from (f"  {line(f'links.{at}', _map(data['links'][at]))}" for at in ("inside", "between"))
    for group in GROUPS:
        values = {f"{group}.{name}": value for name, value in data[group].items()}
        shown = {key: v for key, v in values.items() if v != plain[group][_last(key)] or key in comments}
        if shown:
            yield f"{group}:"
        yield from (f"  {line(key, exact(v))}" for key, v in shown.items())


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _map(values: Mapping[str, float | bool]) -> str:
    """Returns a map on one line, without ``False`` values, which are the defaults."""
    shown = {
        name: "true" if value is True else exact(value)
        for name, value in values.items()
        if value is not False
    }
    return f"{{{', '.join(f'{name}: {value}' for name, value in shown.items())}}}"


def exact(value: float) -> str:
    """Returns all digits of ``value`` without an exponent: YAML 1.1 reads ``1e-05`` as a string.

    >>> exact(98.4371), exact(1e-05), exact(3.0), exact(1200)
    ('98.4371', '0.00001', '3', '1200')
    """
    return f"{Decimal(repr(value)).normalize():f}"


def number(value: float) -> str:
    """Returns ``value`` with three significant digits.

    >>> number(98.437), number(0.0001234), number(0.0), number(1234567.0)
    ('98.4', '0.000123', '0', '1230000')
    """
    return f"{Decimal(f'{value:.3g}'):f}"
