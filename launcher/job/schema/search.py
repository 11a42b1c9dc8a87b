"""``search``: settings of ``parallel`` that are left to the search for a layout, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from launcher.job.schema.base import Count, Index, Settings
from launcher.job.schema.run_paths import FilePath

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
"""Keys that may be ``auto`` or a list of candidates."""
OWN_AUTO = ("parallel.pipeline.scheduler", "parallel.recompute")
"""Those that a plan settles by itself where nothing else is searched for."""
GRID = {"pp": "parallel.pipeline.stages", "tp": "parallel.grid.tp", "dp_shard": "parallel.hsdp.shard_size"}
"""What the axes of ``parallel.grid`` are left open by."""

FUSION, NETWORK = "parallel.comm_fusion", "network"
"""What ``auto`` leaves open of fusion is the network that its sizes are fitted to."""

Candidates = Literal["auto"] | tuple[Any, ...] | dict[str, Any]


class Search(Settings):
    """``over``: candidates of each key; ``auto`` and lists that are written at the keys come here.

    Candidates of operators have names.
    """

    over: dict[str, Candidates] = Field({}, description="keys below parallel: auto, or a list of candidates")
    measure: Index = Field(
        0, description="the best so many run for a few steps; what they take decides, and refits the cluster"
    )
    steps: Count = Field(8, description="optimizer steps of each run that is measured")
    best: FilePath | None = Field(
        "plan/best.yaml", description="recipe that show=search writes, beside it cluster.yaml; null: none"
    )


def every_axis() -> dict[str, Any]:
    """``parallel: auto`` as the keys that it leaves open, of which each can be closed again."""
    out: dict[str, Any] = {"pipeline": {"stage_config": AUTO}, "grid": dict.fromkeys(("pp", "dp_shard"))}
    for key in AXES:
        _, *above, name = key.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        if isinstance(node, dict):  # what is open as a whole is open below
            node[name] = AUTO
    return out


def lifted(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` of a request with what is searched for at ``search.over``, not at its keys."""
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
    found = {key: value for key in AXES if _open(value := _value(out, key))}
    if over or any(found[key] != AUTO or key not in OWN_AUTO for key in found):
        over = found | over
    for key in found:
        if key in over:
            _drop(out, key)
    if over:
        out["search"] = search | {"over": {key: over[key] for key in (*AXES, *over) if key in over}}
    return out


def _grid_left_open(parallel: Mapping[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``grid: auto`` is all of its axes; what an axis leaves open is a key of its own."""
    out = dict(parallel)
    grid = out.get("grid")
    if grid == AUTO:
        grid = dict.fromkeys(GRID, AUTO)
    if not isinstance(grid, Mapping):
        return out
    for axis, key in GRID.items():
        if axis != "tp" and _open(grid.get(axis)):
            over.setdefault(key, _settled(grid[axis]))
    out["grid"] = {
        name: None if name in GRID and name != "tp" and _open(n) else n for name, n in grid.items()
    }
    return out


def _network_left_open(parallel: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``comm_fusion: {network: auto}`` is ``comm_fusion: auto`` beside other keys of it."""
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
    """What lies at ``key``, candidates as a tuple; ``None`` where nothing does."""
    node: Any = data
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return _settled(node) if _open(node) else None


def _drop(data: dict[str, Any], key: str) -> None:
    """Without ``key``; what is above it is copied first."""
    *above, name = key.split(".")
    node = data
    for part in above:
        node[part] = dict(node[part])
        node = node[part]
    del node[name]
