"""Every schedule in every layout, tied and untied: what is refused, and how close the rest is to one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any, get_args

import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Scheduler
from launcher.parallel import grad_norm
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.compare import full_tensors_on_rank_0, pieces
from tests.parity import LM, alone, build, error, job, step
from tests.parity.reference import Outcome
from tests.ranks import on_ranks
from tests.tiers import some

TOLERANCE = 1e-12
PIECES: dict[str, dict[str, Any]] = {
    "seqpipe": {"seq_chunks": 2},
    "seqvpp": {"seq_chunks": 2, "interleave": True},
    "seqsmartvpp": {"seq_chunks": 2, "interleave": True},
}
"""The settings that schedules of sequence pieces need."""
SCHEDULES: dict[str, dict[str, Any]] = {
    **{name: {"scheduler": name, **PIECES.get(name, {})} for name in get_args(Scheduler) if name != "auto"},
    "1f1b interleaved": {"scheduler": "1f1b", "interleave": True},
    "gpipe interleaved": {"scheduler": "gpipe", "interleave": True},
}
"""The names in the schema: a new scheduler gets its row automatically."""


def _hsdp(level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}


OPERATORS = {
    "layers.*.attn.[qkv]": {"weight": ["tp", None]}, "layers.*.attn.o": {"weight": [None, "tp"]},
    "layers.*.mlp.gate": {"weight": ["tp", None]}, "layers.*.mlp.up": {"weight": ["tp", None]},
    "layers.*.mlp.down": {"weight": [None, "tp"]},
}  # fmt: skip
OVER = {"matrix": [2, 2], "axes": ["x", "y"]}
MATRICES = {
    "operators": {
        "layers.*.attn.[qkv]": {**OVER, "in": [["x", None, None], ["y", None]]},
        "layers.*.attn.o": {**OVER, "in": [["y", None, "x"], [None, "x"]]},
        "layers.*.mlp.down": {"in": [[1, 2, 2], [1, 2]]},
        "norm": {"in": [[1, 4, 1], [1]]},
        "head": {"in": [[2, 1, 1], [2, 1]]},
    }
}  # fmt: skip
"""Adjacent operators have different layouts; operators that are not named are split by samples."""


def _matrices(level: str) -> dict[str, Any]:
    return {**MATRICES, "hsdp": {"threshold": 0, "optimizer_level": level}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "level1": _hsdp("level1"),
    "level2": _hsdp("level2"),
    "level3": _hsdp("level3"),
    "HSDP 2x2": {**_hsdp("level1"), "grid": {"dp_replicate": 2}},
    "TP": {"grid": {"tp": 2}, "operators": OPERATORS},
    "device matrices": MATRICES,
    "device matrices level1": _matrices("level1"),
    "device matrices level2": _matrices("level2"),
    "device matrices level3": _matrices("level3"),
}
NPROC = {name: 8 for name in LAYOUTS if name.startswith("device matrices")}
"""Numbers of ranks that do not follow from the sizes of the layout."""
TIES = {"tied": True, "untied": False}
Cell = tuple[str, str, str]
"""Schedule, layout, tie."""
TRIED: list[Cell] = some(product(SCHEDULES, LAYOUTS, TIES), 8)


def job_of_cell(cell: Cell) -> Job:
    schedule, layout, tie = cell
    pipeline = {"stages": 2, "micro_batch_num": 4, **SCHEDULES[schedule]}
    made = job(parallel={"pipeline": pipeline, **LAYOUTS[layout]}, model={**LM, "layers": 2, "tied": TIES[tie]},
               train__batch_size=16)  # fmt: skip
    if layout not in NPROC:
        return made
    return made.model_copy(update={"launch": made.launch.model_copy(update={"nproc": NPROC[layout]})})


def planned(cell: Cell) -> Plan | str:
    """Return the plan, or the reason why there is none."""
    try:
        return plan_job(job_of_cell(cell))
    except RequestError as refused:
        return f"refused: {'; '.join(f'{p.key}: {p.text}' for p in refused.problems)}"


def measured() -> dict[Cell, str]:
    """Return for each cell ``exact to 1e-12``, ``refused: ...``, or what is wrong.

    Each number of ranks is forked once.
    """
    cells = [*TRIED, *(("1f1b", "none", tie) for tie in TIES)]
    plans = {cell: planned(cell) for cell in cells}
    said = {cell: plan for cell, plan in plans.items() if isinstance(plan, str)}
    sizes: dict[int, dict[Cell, tuple[Job, Plan]]] = {}
    for cell, plan in plans.items():
        if isinstance(plan, Plan):
            sizes.setdefault(plan.sizes.grid.size, {})[cell] = job_of_cell(cell), plan
    want = {tie: alone(job_of_cell(("1f1b", "none", tie)), _first(plans, tie)) for tie in TIES}
    for size, mine in sizes.items():
        said |= on_ranks(size, _all, mine, want, timeout_s=300)[0]
    return {cell: said[cell] for cell in TRIED}


def _first(plans: Mapping[Cell, Plan | str], tie: str) -> Plan:
    plan = plans["1f1b", "none", tie]
    assert isinstance(plan, Plan)
    return plan


def _all(world: World, cells: Mapping[Cell, tuple[Job, Plan]], want: Mapping[str, Outcome]) -> dict[Cell, str]:
    return {cell: _one(world, j, plan, want[cell[2]]) for cell, (j, plan) in cells.items()}


def _one(world: World, j: Job, plan: Plan, want: Outcome) -> str:
    """Compare the loss, the norm and every gradient of one step on all ranks with those of one process."""
    par, pipe = build(world, j, plan)
    both = torch.stack([step(j, par, pipe), grad_norm.build(par).squared()])
    torch.distributed.all_reduce(both)
    got = full_tensors_on_rank_0(plan, pieces(par))
    if got is None:
        return ""
    loss = both[0].item()
    off = {"loss": abs(loss - want.loss) / want.loss, "norm": abs(both[1].sqrt().item() - want.norm) / want.norm}
    off |= {n: error(got.tensors[n], g) if n in got.tensors else float("inf") for n, g in want.grads.items()}
    wrong = [*got.complaints, *(f"{n} {e:.1e}" for n, e in off.items() if not e <= TOLERANCE)]
    return f"wrong: {'; '.join(wrong)}" if wrong else f"exact to {TOLERANCE:.0e}"


@cache
def once() -> dict[Cell, str]:
    return measured()
