"""The layouts in which every model of the zoo is tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH, STEPS, SAMPLES, CLIP = 32, 3, 120, 1.0


@dataclass(frozen=True)
class Layout:
    """``ranks`` in ``stages`` x replicas; ``virtual``: the number of stages in the split."""

    ranks: int
    stages: int = 1
    virtual: int = 1
    micros: int = 2
    pipeline: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH

    @property
    def cuts_operators(self) -> bool:
        return "mode" in self.parallel

    @property
    def replicas(self) -> int:
        """Replicas of the full batch; ranks that shard operators are one replica together."""
        return 1 if self.cuts_operators else self.ranks // self.stages


def _shard(size: int, level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": size, "threshold": 0, "optimizer_level": level}}


SEARCHED = {
    "mode": "recursive_programming",
    "comm_fusion": {"network": {"latency_us": 1e-6, "gb_per_s": 1e6}},  # so fast that operators are sharded
}

LAYOUTS = {
    "one rank": Layout(1),
    "pp2": Layout(2, 2, 2, 4),
    "pp2 shard2 level1": Layout(4, 2, 2, 4, parallel=_shard(2, "level1")),
    "pp2 shard2 level3": Layout(4, 2, 2, 4, parallel=_shard(2, "level3")),
    "pp3 zero_bubble_h1": Layout(3, 3, 3, 4, {"scheduler": "zero_bubble_h1"}),
    "shard4 level2": Layout(4, parallel=_shard(4, "level2")),
    "replicate2 shard2": Layout(4, parallel=_shard(2, "level1")),
    "zero_bubble_v shard2 level2": Layout(4, 2, 4, 4, {"scheduler": "zero_bubble_v"}, _shard(2, "level2")),
    "shard2 level3": Layout(2, parallel=_shard(2, "level3")),
    "pp2 recompute": Layout(2, 2, 2, 4, parallel={"recompute": {"modules": "*"}}),
    "shard2 level3 selective": Layout(
        2, parallel=_shard(2, "level3") | {"recompute": {"modules": "*", "policy": "selective"}}
    ),
    "searched": Layout(2, parallel=SEARCHED),
    "pp2 searched level2": Layout(4, 2, 2, 4, parallel=SEARCHED | _shard(2, "level2")),
    "interleaved searched": Layout(4, 2, 4, 4, {"interleave": True}, SEARCHED),
}
