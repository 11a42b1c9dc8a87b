"""Fits the constants of a cluster to measured seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from launcher.job.schema.cluster import Cluster
from launcher.plan.time.prediction import predict
from launcher.plan.time.speeds import FLASH_BACKWARD, TWICE, speeds_of
from launcher.plan.time.step_work import StepWork
from launcher.plan.values.operations import Operations, Product


@dataclass(frozen=True)
class TimedProduct:
    """A matrix product."""

    precision: str
    product: Product


@dataclass(frozen=True)
class TimedAttention:
    """The forward and backward of fused attention; ``flops``: those of the forward, without masked parts."""

    precision: str
    flops: int


@dataclass(frozen=True)
class Moved:
    """Kernels that move bytes.

    ``copy``: a copy of a large tensor. ``others``: what a block does besides products and attention.
    ``tiny``: a block of tensors so small that only launching takes time.
    """

    kind: Literal["copy", "others", "tiny"]
    done: Operations


@dataclass(frozen=True)
class TimedBlock:
    """A block on ranks with a core each; ``alone``: on one rank while the other cores are idle."""

    alone: bool


@dataclass(frozen=True)
class TimedCollective:
    """A collective over ``ranks`` ranks of one node, or one on each node; ``nbytes``: the full tensor."""

    link: Literal["inside", "between"]
    kind: str
    nbytes: int
    ranks: int


@dataclass(frozen=True)
class TimedMessage:
    """A message from one rank to the next: half of the time there and back."""

    link: Literal["inside", "between"]
    nbytes: int


@dataclass(frozen=True)
class Overlap:
    """A product, gradients on the network, ``both`` at once, or in ``turns``: one waits for the other."""

    kind: Literal["product", "network", "both", "turns"]


@dataclass(frozen=True)
class Trained:
    """A step of a tiny model on replicas, or on the same number of stages."""

    layout: Literal["replicas", "stages"]


@dataclass(frozen=True)
class Taken:
    """The fraction of time in which other processes used a core on which a rank wanted to compute."""


Timed = (
    Taken
    | TimedProduct
    | TimedAttention
    | Moved
    | TimedBlock
    | TimedCollective
    | TimedMessage
    | Overlap
    | Trained
)
Round = Mapping[Timed, float]
"""One measurement of everything: the seconds of each operation, and the fraction that was ``Taken``."""


@dataclass(frozen=True)
class Works:
    """The tiny models that are trained: their precision, and the work of a step on replicas and on stages."""

    precision: str
    replicas: StepWork
    stages: StepWork


@dataclass(frozen=True)
class MeasuredMachine(Works):
    """The machine that is measured.

    ``memory_gb``: the memory of a rank; ``per_node``: ranks on a node; ``cores``: cores of a node, if ranks
    are processes that share them instead of having devices.
    """

    name: str
    memory_gb: float
    per_node: int
    cores: int | None


BACKWARD = 2.5
"""The flops of attention's backward for each flop of its forward."""
FLOORS = {
    "small": 64.0,  # 30 % of it change the time of products with sides of 256 by a fifth
    "launch_us": 1.0,
    "latency_us": 1.0,
    "exposed": 1.0,
    "exposed_sums": 1.0,
    "exposed_tp": 1.0,
}
"""Spreads are relative to the constant, or to this value if the constant is smaller.

Constants that are too small to matter may be noisy.
"""
LEAST_SECONDS = 1e-9
BATCHES = 5
HALVINGS, TURNS = 18, 5
Values = dict[str, float]


@dataclass(frozen=True)
class FittedConstant:
    """A fitted constant; ``spread``: the distance of its quartiles over batches of rounds, relative to it."""

    key: str
    value: float
    spread: float


def constants(rounds: Sequence[Round], machine: MeasuredMachine) -> tuple[FittedConstant, ...]:
    """Returns the constants by their keys in a file of ``conf/cluster``.

    A spread compares the constants that are fitted to the medians of each batch of rounds.
    """
    middle = typical(rounds)
    floors = FLOORS | _rests(middle, machine)
    each = [fitted(_each(statistics.median, part), machine) for part in _batches(rounds)]
    return tuple(
        _constant(key, value, [values[key] for values in each], floors.get(key.rpartition(".")[2], 0.0))
        for key, value in fitted(middle, machine).items()
    )


def typical(rounds: Sequence[Round]) -> Round:
    """Returns for each timed operation the median of its means over ``BATCHES`` batches of rounds.

    A step has many of these operations, so it takes the sum of their means, which slow moments make longer
    than medians. The median excludes a batch in which the machine did something else.
    """
    means = [_each(statistics.mean, part) for part in _batches(rounds)]
    return {operation: statistics.median(mean[operation] for mean in means) for operation in rounds[0]}


def _batches(rounds: Sequence[Round]) -> list[Sequence[Round]]:
    """Deals the rounds out to batches in turn."""
    return [rounds[n::BATCHES] for n in range(min(BATCHES, len(rounds)))]


def _each(middle: Callable[[list[float]], float], rounds: Sequence[Round]) -> Round:
    return {operation: middle([r[operation] for r in rounds]) for operation in rounds[0]}


def taken(rounds: Sequence[Round]) -> float:
    """Returns the fraction of the time in which other processes used the cores, as the median over rounds."""
    return statistics.median(r.get(Taken(), 0.0) for r in rounds)


def noisy(constants: Sequence[FittedConstant], most: float) -> tuple[FittedConstant, ...]:
    """Returns the constants whose spread is larger than ``most``."""
    return tuple(c for c in constants if c.spread > most)


def refusal(constants: Sequence[FittedConstant], others: float, most: float) -> str:
    """Returns why no file is written and what to do, or ``""`` if it is written.

    ``others``: the share of time that other processes have ``taken``; ``most``: the largest spread or share.
    """
    reasons = [f"{c.key} {c.value:.3g} (spread {c.spread:.0%})" for c in noisy(constants, most)]
    if others > most:
        reasons.insert(0, f"other processes used the cores {others:.0%} of the time")
    cure = "Run it again while the machine is idle"
    why = f"the machine is too busy: {', '.join(reasons)}; at most {most:.0%}"
    return f"calibrate: nothing is written, because {why}. {cure}" if reasons else ""


def _rests(timings: Round, machine: MeasuredMachine) -> Values:
    """Returns the milliseconds of a tiny step and of a slot of one.

    ``step_ms`` and ``slot_ms`` are the unexplained parts of these, so their spreads are relative to these.
    """
    took = {w.layout: s for w, s in timings.items() if isinstance(w, Trained)}
    slots = max(map(len, machine.stages.schedule))
    return {"step_ms": took["replicas"] * 1e3, "slot_ms": took["stages"] * 1e3 / slots}


def _constant(key: str, value: float, values: Sequence[float], floor: float) -> FittedConstant:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (value,) * 3
    scale = max(abs(value), floor)
    return FittedConstant(key, value, (high - low) / scale if scale else 0.0)


def fitted(timings: Round, machine: MeasuredMachine) -> Values:
    """Returns the constants that fit one round, or the typical values of several."""
    values = _products(timings)
    values |= _kernels(timings, machine, values)
    values |= _links(timings)
    values |= _exposed(timings, machine)
    return values | _overheads(timings, machine, values)


def _products(timings: Round) -> Values:
    """Returns peaks, efficiency and ``small``.

    The peak of a precision is its fastest product. Efficiency and ``small`` are fitted to the precision with
    most products.
    """
    rates: dict[str, list[tuple[TimedProduct, float]]] = {}
    for operation, seconds in timings.items():
        if isinstance(operation, TimedProduct):
            rates.setdefault(operation.precision, []).append((operation, seconds))
    peaks = {p: max(w.product.flops / s for w, s in timed) for p, timed in rates.items()}

    # seconds = those at the peak x (1 + small (1/m + 1/n + 1/k)) / efficiency, with the least relative error
    first = max(rates, key=lambda p: len(rates[p]))
    lines = []
    for operation, seconds in rates[first]:
        p = operation.product
        ideal = p.flops / peaks[first] / seconds
        lines.append((ideal, ideal * (1 / p.m + 1 / p.n + 1 / p.k)))
    constant_term, short = _least_squares(lines)
    if not constant_term:  # short sides explain all lost time, so efficiency is 1
        squares = sum(part * part for _, part in lines)
        constant_term, short = 1.0, max(0.0, sum(part * (1 - ideal) for ideal, part in lines) / squares)
    out = {f"tflops.{p}": peak / 1e12 for p, peak in peaks.items()}
    return out | {"efficiency": min(1.0, 1 / constant_term), "kernels.small": short / constant_term}


def _kernels(timings: Round, machine: MeasuredMachine, values: Values) -> Values:
    attended, seconds = next((w, s) for w, s in timings.items() if isinstance(w, TimedAttention))
    flops = attended.flops * (1 + BACKWARD / FLASH_BACKWARD)
    peak = values.get(f"tflops.{attended.precision}", min(v for k, v in values.items() if "tflops" in k))
    moved = {w.kind: (w.done, s) for w, s in timings.items() if isinstance(w, Moved)}

    # cores that compute also launch the kernels, which takes time from computing
    (tiny, took), (others, spent), (copied, copy) = moved["tiny"], moved["others"], moved["copy"]
    launch = took / tiny.kernels
    host = others.kernels * launch if machine.cores is not None else 0.0
    reached = others.moved / max(spent - host, LEAST_SECONDS)
    most = max(reached, copied.moved / copy)
    return _alone(timings) | {
        "memory_gb_per_s": most / 1e9,
        "kernels.attention": min(1.0, flops / seconds / (peak * 1e12)),
        "kernels.memory": reached / most,
        "kernels.launch_us": launch * 1e6,
    }


def _alone(timings: Round) -> Values:
    """Returns ``kernels.alone``, if ranks share cores: how much longer a block takes while all compute."""
    took = {w.alone: s for w, s in timings.items() if isinstance(w, TimedBlock)}
    return {"kernels.alone": max(1.0, took[False] / took[True])} if took else {}


def _links(timings: Round) -> Values:
    """Returns latency and bytes per second of links; with one node, ``between`` is the same as ``inside``."""
    inside = _link(timings, "inside")
    between = _link(timings, "between") or inside
    inside = inside or between
    assert inside is not None, "no collective was timed"
    assert between is not None
    return {
        **{f"links.inside.{key}": value for key, value in _link_values(inside).items()},
        **{f"links.between.{key}": value for key, value in _link_values(between).items()},
        "overheads.scatter": inside.scattered / inside.byte,
    }


@dataclass(frozen=True)
class _Link:
    """The seconds of a ``step`` of a ring, and the seconds per byte.

    ``byte`` is for collectives, ``scattered`` for a reduce-scatter, ``sent`` for a message.
    """

    step: float
    byte: float
    scattered: float
    sent: float


def _link_values(link: _Link) -> Values:
    return {
        "latency_us": link.step * 1e6,
        "gb_per_s": 1e-9 / link.byte,
        "message_gb_per_s": 1e-9 / link.sent,
    }


def _link(timings: Round, link: Literal["inside", "between"]) -> _Link | None:
    """Returns the constants of a link, or ``None`` if no collective was timed on it."""
    lines = []
    for operation, seconds in timings.items():
        if isinstance(operation, TimedCollective) and operation.link == link:
            n = operation.ranks
            nbytes = TWICE.get(operation.kind, 1.0) * (n - 1) / n * operation.nbytes / seconds
            scatters = operation.kind == "reduce_scatter"
            lines.append(((n - 1) / seconds, 0.0 if scatters else nbytes, nbytes if scatters else 0.0))
    if not lines:
        return None
    step, byte, scattered = _least_squares(lines)

    # the largest message, for which latency matters least
    longest = max((w.nbytes, s) for w, s in timings.items() if isinstance(w, TimedMessage) and w.link == link)
    nbytes, seconds = longest
    byte = max(byte, 1e-15)
    return _Link(step, byte, max(scattered, 1e-15), sent=max(seconds - step, seconds / 2) / nbytes)


def _exposed(timings: Round, machine: MeasuredMachine) -> Values:
    """Returns the exposed fractions: sending during a product and after one, relative to sending alone.

    A share may exceed 1, because ranks wait for the slowest one. On shared cores all shares are 1: sending is
    timed after a product there, because the cores that compute also send.
    """
    if machine.cores is not None:
        return dict.fromkeys(("overheads.exposed", "overheads.exposed_sums", "overheads.exposed_tp"), 1.0)
    took = {w.kind: s for w, s in timings.items() if isinstance(w, Overlap)}
    share, waited = (max(0.0, took[w] - took["product"]) / took["network"] for w in ("both", "turns"))
    return {"overheads.exposed": share, "overheads.exposed_sums": share, "overheads.exposed_tp": waited}


def _overheads(timings: Round, machine: MeasuredMachine, values: Values) -> Values:
    """Returns the overheads: the time of tiny models that the other constants do not explain."""
    took = {w.layout: s for w, s in timings.items() if isinstance(w, Trained)}

    def seconds(work: StepWork, step: float, slot: float) -> float:
        known = {**values, "overheads.step_ms": step, "overheads.slot_ms": slot}
        fast = speeds_of(cluster(known, machine), machine.precision, machine.per_node)
        assert fast is not None
        return predict(work, fast).seconds

    # replicas have few actions and stages have many, so fitting them in turn converges quickly
    step = slot = 0.0
    for _ in range(TURNS):
        step = _solved(partial(seconds, machine.replicas, slot=slot), took["replicas"])
        slot = _solved(partial(seconds, machine.stages, step), took["stages"])
    return {"overheads.slot_ms": slot, "overheads.step_ms": step}


def _solved(seconds: Callable[[float], float], took: float) -> float:
    """Returns the milliseconds for which ``seconds`` returns ``took``; 0 if ``seconds(0)`` is larger.

    ``seconds`` must grow with its argument.
    """
    low, high = 0.0, 1e3 * took
    if seconds(low) >= took:
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < took else (low, middle)
    return high


def cluster(values: Mapping[str, float], machine: MeasuredMachine) -> Cluster:
    """Returns the cluster with these constants, as a file would contain it."""
    settings: dict[str, Any] = {
        "name": machine.name,
        "memory_gb": machine.memory_gb,
        "devices_per_node": machine.per_node,
        "cores_per_node": machine.cores,
    }
    for key, value in values.items():
        *above, last = key.split(".")
        at = settings
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
    return Cluster.model_validate(settings)


def _least_squares(lines: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Returns non-negative factors with which each of ``lines`` adds up to about 1.

    A factor that would be negative is 0, and the others are fitted without it. A factor whose column is all
    zeros is 0 too.
    """
    matrix = np.array(lines, dtype=float)
    columns = [c for c in range(matrix.shape[1]) if matrix[:, c].any()]
    out = np.zeros(matrix.shape[1])
    while columns:
        factors, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)
        if (factors >= 0).all():
            out[columns] = factors
            break
        columns = [c for c, x in zip(columns, factors, strict=True) if x > 0]
    return tuple(float(x) for x in out)
