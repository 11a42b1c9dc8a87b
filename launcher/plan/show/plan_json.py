"""The plan as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from launcher.optional import matrices
from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.plan import VERSION, Estimate, Observed, Plan
from launcher.plan.schedule.simulate import Timeline
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel.module_strategies import Operator
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator
from launcher.plan.time.prediction import Prediction

DERIVED: dict[type, tuple[str, ...]] = {
    Memory: ("total",),
    Timeline: ("bubble",),
    Sizes: ("replicas", "virtual", "places"),
}
LEFT_OUT: dict[type, tuple[str, ...]] = {
    Timeline: ("events",),
    BoundaryTensor: ("dims",),
    Placed: ("layout",),
    Sizes: ("notes", "engine"),
    Estimate: ("loads", "work"),
    Prediction: ("timeline", "shares", "networks"),
    Plan: ("sharding", "graph", "drill"),
    Observed: ("reads_values",),
    Operator: ("where",),
    ShardedOperator: ("dims",),
}
"""Fields that are not written. Starts of actions are in ``timeline.json``; the grid of layouts and the notes
of sizes are those of the plan.
"""

ORDER = (
    "name", "seed", "precision", "dtypes", "sizes", "scheduler", "hsdp",
    "leaves", "stages", "boundaries", "pieces", "inputs", "output", "output_keys", "params",
    "param_groups", "ties", "groups", "visits", "gathers", "buckets", "scatters", "reduces_early", "overlaps",
    "operators", "sharding", "recomputed", "compilation", "sums",
    "schedule", "evaluation", "timeline", "memory", "traffic", "flops", "rerun", "room", "step",
    "phases", "settings", "notes",
    "deferred", "ema", "gradients_mean", "loss_reduction", "output_broadcast", "reading", "objective",
    "training", "loss_repeats", "optimizer", "changed", "restored", "moves", "unsteady", "mixed",
    "batch_dependent", "lookups",
)  # fmt: skip
"""The order of a plan's values: decided, estimated and observed values are on one level."""


def as_json(plan: Plan) -> str:
    """Returns every value of the plan and the format version, one item per line, for comparing plans."""
    plan_dict = _as_dict(plan)
    values = {"version": VERSION} | {key: plan_dict[key] for key in sorted(plan_dict, key=ORDER.index)}
    rows = [f" {json.dumps(key)}: {_written(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _as_dict(plan: Plan) -> dict[str, Any]:
    plan_dict: dict[str, Any] = _plain(plan)
    plan_dict.update(plan_dict.pop("estimate"))
    plan_dict.update(plan_dict.pop("observed"))
    if plan.sharding is not None:
        plan_dict["sharding"] = matrices.sharding_json(plan.sharding)
    return plan_dict


def _written(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(v, list | dict) for v in value):
        return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]"
    return json.dumps(value)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "_asdict"):  # an action
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.name not in LEFT_OUT.get(type(value), ())]
        out = {name: _plain(getattr(value, name)) for name in (*names, *DERIVED.get(type(value), ()))}
        if isinstance(value, Placed):
            out |= {"split": value.layout.split, "at": value.layout.at}
        return out
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value
