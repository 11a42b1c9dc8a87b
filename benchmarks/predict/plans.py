"""Plans rows; those of one model and micro batch are planned together, so that its forward is traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from benchmarks.predict.frameworks import with_framework_memory
from benchmarks.predict.requests import request
from benchmarks.predict.rows import Row, UnusableRow, parsed
from launcher.errors import RequestError
from launcher.job.schema.cluster import Cluster
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.plan import Plan
from launcher.plan.schedule import schedules
from launcher.plan.time.step_work import StepWork
from launcher.planner.plan_job import plan_job
from launcher.planner.trace_model import Traces


@dataclass(frozen=True, eq=False)
class Planned:
    """The part of a row's plan that is kept.

    ``states``: mean bytes per rank of weights, gradients and optimizer. ``kept``: bytes that the layers of
    the first stage keep for their backwards.
    """

    row: Row
    cluster: Cluster
    work: StepWork
    states: int
    kept: int


def planned(rows: Sequence[dict[str, str]], processes: int = 1) -> dict[str, Planned | str]:
    """Return the plan of each layout by ``key``, or the reason why there is none."""
    found: dict[str, Planned | str] = {}
    asked: dict[tuple[object, ...], dict[str, Row]] = {}
    for raw in rows:
        try:
            row = parsed(raw)
        except UnusableRow as error:
            found[key(raw)] = str(error)
        else:
            shared = (row.raw["model"], row.hidden, row.layers, row.seq, row.tp, row.micro, row.recompute)
            asked.setdefault(shared, {})[key(raw)] = row
    groups = [list(group.values()) for group in asked.values()]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        run: Callable[..., Iterator[list[Planned | str]]] = pool.map if processes > 1 else map
        for group, plans in zip(groups, run(_group, groups), strict=True):
            found |= {key(row.raw): plan for row, plan in zip(group, plans, strict=True)}
    return found


def key(raw: dict[str, str]) -> str:
    """Return a key of everything in a row except the measurement."""
    return "|".join(v for k, v in raw.items() if k not in ("metric", "value", "unit"))


def _group(rows: Sequence[Row]) -> list[Planned | str]:
    traces = Traces(keeps_messages=False)
    return [_planned(row, traces) for row in rows]


def _planned(row: Row, traces: Traces) -> Planned | str:
    """Plan a row.

    A pipeline that has too few micro batches is planned with enough, and the plan is then reduced.
    """
    try:
        enough = max(row.micros, row.pp if row.vpp == 1 else 1)
        job = request(replace(row, batch=row.dp * row.micro * enough))
        plan = plan_job(job.model_copy(update={"cluster": _roomy(job.cluster)}), traces)
    except UnusableRow as error:
        return str(error)
    except RequestError as error:
        return "; ".join(f"{p.key}: {p.text}" for p in error.problems)
    work, memory, in_flight = plan.estimate.work, _fullest(plan), plan.estimate.timeline.in_flight
    states, kept = _bytes(plan)
    if row.micros < enough:
        share = [min(1.0, row.micros / n) for n in in_flight]
        work, memory = _with_fewer(row, work, memory, share)
        in_flight, kept = tuple(min(n, row.micros) for n in in_flight), int(kept * share[0])
    return Planned(row, job.cluster, with_framework_memory(row, work, memory, in_flight), states, kept)


def _with_fewer(
    row: Row, work: StepWork, memory: Sequence[Memory], share: Sequence[float]
) -> tuple[StepWork, list[Memory]]:
    """Return the work and the memory with as many micro batches as the row has.

    ``share``: the share of its activations that each pipeline rank then keeps for its backwards.
    """
    left = [replace(m, activations=int(m.activations * s)) for m, s in zip(memory, share, strict=True)]
    ranks = [replace(r, memory=m.total) for r, m in zip(work.ranks, left, strict=True)]
    micros, enough = row.micros, work.micros
    fewer = replace(
        work,
        schedule=schedules.build("1f1b", row.pp, 1, micros),
        micros=micros,
        ranks=tuple(ranks),
        flops=work.flops * micros // enough,
        samples=row.batch,
        tokens=None if work.tokens is None else work.tokens * micros // enough,
    )
    return fewer, left


def _fullest(plan: Plan) -> list[Memory]:
    """Return for each pipeline rank the memory of the rank that needs most."""
    grid, memory = plan.sizes.grid, plan.estimate.memory
    return [
        max((memory[rank] for rank in grid.ranks(pp=pp)), key=lambda m: m.total) for pp in range(grid["pp"])
    ]


def _roomy(cluster: Cluster) -> Cluster:
    """Return the cluster without a memory limit, so that layouts that do not fit are planned too."""
    return cluster.model_copy(update={"memory_gb": None})


def _bytes(plan: Plan) -> tuple[int, int]:
    memory = plan.estimate.memory
    each = sum(2 * m.params + (m.params // 2 if plan.dtypes.mixed else 0) + m.optimizer for m in memory)
    return each // len(memory), plan.estimate.timeline.peak[0]
