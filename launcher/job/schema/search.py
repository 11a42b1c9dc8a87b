"""Settings of layout searches and sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from launcher.job.schema.base import Count, Flag, Goal, Index, Many, Number, Settings
from launcher.job.schema.paths import FilePath

AUTO = "auto"
PARALLEL = "parallel"
AXES = (
    "parallel.operators",
    "parallel.grid.tp",
    "parallel.pipeline.stages",
    "parallel.pipeline.scheduler",
    "parallel.pipeline.interleave",
    "parallel.pipeline.chunks",
    "parallel.pipeline.micro_batch_num",
    "parallel.hsdp",
    "parallel.hsdp.shard_size",
    "parallel.hsdp.optimizer_level",
    "parallel.recompute",
    "parallel.comm_fusion",
)
"""The keys that may be ``auto`` or a list of candidates."""
RECOMPUTE = "parallel.recompute"
OWN_AUTO = ("parallel.pipeline.scheduler", RECOMPUTE)
"""Keys at which the plan itself decides ``auto``, unless another key is searched."""
DEGREES = {"pp": "parallel.pipeline.stages", "tp": "parallel.grid.tp", "dp_shard": "parallel.hsdp.shard_size"}
"""The key that is searched if an axis of ``parallel.grid`` is open, by axis."""

FUSION, NETWORK = "parallel.comm_fusion", "network"
"""``auto`` for fusion leaves open the network for which sizes are chosen."""

Candidates = Literal["auto"] | tuple[Any, ...] | dict[str, Any]


class Search(Settings):
    """Settings of a search. ``over``: the candidates of each key, including those written at the keys.

    Candidates for operators have names.
    """

    over: dict[str, Candidates] = Field({}, description="keys below parallel: auto, or a list of candidates")
    measure: Index = Field(
        0, description="so many of the best run for a few steps; their times decide, and refit the cluster"
    )
    steps: Count = Field(8, description="optimizer steps of each run that is measured")
    best: FilePath | None = Field(
        "plan/best.yaml", description="recipe that show=search writes, cluster.yaml next to it; null: none"
    )


def every_axis() -> dict[str, Any]:
    """Returns the keys that ``parallel: auto`` leaves open; each of them can still be set."""
    out: dict[str, Any] = {"pipeline": {"stage_config": AUTO}, "grid": dict.fromkeys(("pp", "dp_shard"))}
    for key in AXES:
        _, *above, name = key.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        if isinstance(node, dict):  # an open section needs no open keys
            node[name] = AUTO
    return out


def lifted(data: Mapping[str, Any]) -> dict[str, Any]:
    """Moves candidates in the ``data`` of a request from their keys to ``search.over``."""
    out = dict(data)
    search = dict(out.get("search") or {})
    if not isinstance(search.get("over", {}), Mapping):
        return out
    over = dict(search.get("over") or {})
    parallel = out.get(PARALLEL)
    if parallel == AUTO:
        over = dict.fromkeys(AXES, AUTO) | over
        parallel = {}
    if not isinstance(parallel, Mapping):
        return out

    out[PARALLEL] = _network_left_open(_grid_left_open(parallel, over), over)
    open_values = {key: value for key in AXES if _open(value := _value(out, key))}
    if over or any(open_values[key] != AUTO or key not in OWN_AUTO for key in open_values):
        over = open_values | over
    for key in open_values:
        if key in over:
            _drop(out, key)
    if over:
        out["search"] = search | {"over": {key: over[key] for key in (*AXES, *over) if key in over}}
    return out


def _grid_left_open(parallel: Mapping[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Expands ``grid: auto`` to its axes, and moves open axes to the keys that decide them, in ``over``."""
    out = dict(parallel)
    grid = out.get("grid")
    if grid == AUTO:
        grid = dict.fromkeys(DEGREES, AUTO)
    if not isinstance(grid, Mapping):
        return out
    for axis, key in DEGREES.items():
        if axis != "tp" and _open(grid.get(axis)):
            over.setdefault(key, _settled(grid[axis]))
    out["grid"] = {
        name: None if name in DEGREES and name != "tp" and _open(n) else n for name, n in grid.items()
    }
    return out


def _network_left_open(parallel: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Treats ``comm_fusion: {network: auto}`` as ``comm_fusion: auto``, and keeps its other keys."""
    fusion = parallel.get("comm_fusion")
    if not isinstance(fusion, Mapping) or fusion.get(NETWORK) != AUTO:
        return parallel
    over.setdefault(FUSION, AUTO)
    return {**parallel, "comm_fusion": {**fusion, NETWORK: None}}


def _open(value: Any) -> bool:
    return bool(value == AUTO) or isinstance(value, list | tuple)


def _settled(value: Any) -> Any:
    return value if value == AUTO else tuple(value)


def _value(data: Mapping[str, Any], key: str) -> Any:
    """Returns the candidates at ``key``, a list as a tuple; ``None`` if it has none."""
    node: Any = data
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return _settled(node) if _open(node) else None


def _drop(data: dict[str, Any], key: str) -> None:
    """Deletes ``key``; copies the mappings above it first."""
    *above, name = key.split(".")
    node = data
    for part in above:
        node[part] = dict(node[part])
        node = node[part]
    del node[name]


GRID: Final = "grid"


class Sweep(Settings):
    """Settings of a sweep (``-m``); a single run ignores them.

    ``parallel``: cells at a time; ``auto``: as many as cores or devices, and memory, allow. ``sampler``:
    ``grid`` runs every combination; the others, which use optuna, propose one cell after another until there
    are ``cells`` of them or ``minutes`` are over.
    """

    over: dict[str, str | tuple[Any, ...]] = Field(
        {}, description="axes: lists of values, or an interval as on the command line, by the key that varies"
    )
    parallel: Many | Literal["auto"] = "auto"
    sampler: Literal["grid", "random", "tpe"] = GRID
    cells: Many | None = Field(
        None, description="cells that a sampler proposes; null: as many as the time allows"
    )
    minutes: Number | None = Field(
        None, gt=0, allow_inf_nan=False, description="minutes after which no cell starts; null: no limit"
    )
    seed: Index = Field(0, description="seed of the sampler")
    metric: str | None = Field(
        None, min_length=1, description="null: val_loss, or loss where nothing is validated"
    )
    goal: Goal = "min"
    prune: Literal["asha", "median"] | None = Field(
        None, description="ends a cell whose metric is worse than that of others at a validation"
    )
    seeds: Many = Field(1, description="runs of each cell, with one seed after another")
    plan: Flag = Field(False, description="plan all cells, print the predictions, run none")
    certify: Flag = Field(False, description="compare the losses of cells that differ only in their layout")
