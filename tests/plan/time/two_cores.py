"""The numbers of a machine with two cores, for tests that must not depend on how ``here`` was measured."""

from __future__ import annotations

LINK = "{latency_us: 691, gb_per_s: 1.11, message_gb_per_s: 3.92}"
TWO_CORES = (
    "cluster=here", "cluster.efficiency=0.96", "cluster.memory_gb_per_s=19.7", "cluster.tflops={fp32: 0.0877}",
    f"cluster.links.inside={LINK}", f"cluster.links.between={LINK}", "cluster.kernels.small=0.679",
    "cluster.kernels.attention=0.383", "cluster.kernels.launch_us=6.52", "cluster.kernels.alone=1",
    "cluster.overheads.scatter=2.45", "cluster.overheads.slot_ms=0.543", "cluster.overheads.step_ms=6.71",
)  # fmt: skip
