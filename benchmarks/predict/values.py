"""The value that is predicted for a row, in the unit of its metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.predict.frameworks import cluster_for
from benchmarks.predict.plans import Planned, key
from benchmarks.predict.rows import MEMORY, TIMES
from launcher.job.schema.cluster import Cluster
from launcher.plan.time.prediction import Prediction, predict
from launcher.plan.time.speeds import speeds_of

GIB = 1 << 30
UNITS = {"GiB": GIB, "GB": 1e9}
TERA = 1e12


@dataclass(frozen=True)
class Compared:
    """A row whose value was measured, with the prediction."""

    raw: dict[str, str]
    plan: Planned
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The signed error relative to the measured value; for a rate, the error of the time behind it."""
        if self.raw["metric"] in TIMES[1:]:
            return self.measured / self.predicted - 1
        return self.predicted / self.measured - 1


def step(plan: Planned, cluster: Cluster | None = None) -> Prediction:
    """Predict a step on the cluster of its framework or on ``cluster``.

    The timeline has no events, because thousands of predictions are kept.
    """
    return _usual(plan) if cluster is None else _on(plan, cluster)


@cache
def _usual(plan: Planned) -> Prediction:
    return _on(plan, cluster_for(plan.row, plan.cluster))


def _on(plan: Planned, cluster: Cluster) -> Prediction:
    speeds = speeds_of(cluster, plan.row.precision)
    assert speeds is not None
    found = predict(plan.work, speeds)
    return replace(found, timeline=replace(found.timeline, events=()))


def value(raw: dict[str, str], plan: Planned, cluster: Cluster | None = None) -> float:
    """Return the predicted value of the metric of ``raw``; ``plan`` is the plan of that row."""
    row, metric, unit = plan.row, raw["metric"], UNITS.get(raw["unit"], 1e9)
    if metric in MEMORY:
        nbytes = {"params_grads_optimizer_memory": plan.states, "activation_memory": plan.kept}
        nbytes["failed"] = step(plan, cluster).needs  # including what the allocator adds
        nbytes["memory"] = min(step(plan, cluster).memory, _room(plan))  # the run was measured, so it fit
        return nbytes[metric] / unit
    seconds = step(plan, cluster).seconds
    flops = plan.work.flops / seconds / row.ranks
    of = {
        "step_time": seconds,
        "tokens_per_s_per_gpu": row.batch * row.seq / seconds / row.ranks,
        "model_tflops_per_gpu": flops / TERA,
        "mfu": 100 * step(plan, cluster).mfu,
    }
    return of[metric]


def _room(plan: Planned) -> int:
    """Return the bytes of the device."""
    gb = cluster_for(plan.row, plan.cluster).memory_gb
    assert gb is not None
    return int(gb * GIB)


def seconds(c: Compared) -> float:
    """Return the measured seconds of a step."""
    row, metric = c.plan.row, c.raw["metric"]
    if metric == "step_time":
        return c.measured
    if metric == "tokens_per_s_per_gpu":
        return row.batch * row.seq / (c.measured * row.ranks)
    found = step(c.plan)
    return found.seconds * (100 * found.mfu / c.measured)


def timed(rows: Iterable[dict[str, str]], plans: dict[str, Planned | str]) -> list[Compared]:
    """Return the rows that measure how long a step takes.

    MFU counts only where a table has nothing else, because its formulas differ.
    """
    found = compared(rows, plans, TIMES[:3])
    return [c for c in found if c.raw["metric"] != "mfu" or c.raw["source"] == "megatron_h100"]


def compared(
    rows: Iterable[dict[str, str]], plans: dict[str, Planned | str], metrics: Sequence[str]
) -> list[Compared]:
    """Return the rows that have a plan and one of these metrics."""
    out = []
    for raw in rows:
        plan = plans[key(raw)]
        if raw["metric"] in metrics and not isinstance(plan, str):
            out.append(Compared(raw, plan, float(raw["value"]), value(raw, plan)))
    return out
