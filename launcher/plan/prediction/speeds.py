"""How fast devices and links of a cluster are: seconds of kernels, of collectives and of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from launcher.job.schema.cluster import Cluster, Links
from launcher.job.schema.job import Job
from launcher.plan.values.operations import Operations, Product

TOGETHER = 4
"""Host and device work at once: n of each take (device**n + host**n)**(1/n), a little over the longer."""
FLASH_BACKWARD = 0.8
"""Of the speed of its forward: attention's backward waits for more."""
TWICE = {"all_reduce": 2.0}
"""Bytes pass a ring so often."""


@dataclass(frozen=True)
class Speeds:
    """A rank's, in FLOP and bytes a second; ``peak`` of matrix products in the precision of the request.

    ``per_node``: ranks of a node, neighbours; ``cores``: of it, where ranks have no devices of their own.
    """

    cluster: Cluster
    links: Links
    peak: float
    efficiency: float
    memory: float
    per_node: int
    cores: int | None = None

    @property
    def attention(self) -> float:
        return self.peak * self.cluster.kernels.attention

    def device_seconds(self, done: Operations, backward: bool = False) -> float:
        """Of kernels, one after the other."""
        attention = done.attention / self.attention
        products = sum(n * self._product(p) for p, n in done.products)
        moved = done.moved * self.cluster.kernels.moved / self.memory
        return products + attention / (FLASH_BACKWARD if backward else 1) + moved

    def host_seconds(self, kernels: int) -> float:
        """Of launching so many."""
        return kernels * self.cluster.kernels.launch_us / 1e6

    def _product(self, p: Product) -> float:
        short = self.cluster.kernels.small * (1 / p.m + 1 / p.n + 1 / p.k)
        return max(p.flops / (self.peak * self.efficiency) * (1 + short), p.nbytes / self.memory)

    def collective_seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Around a ring over ``ranks``; bytes of the whole tensor.

        Between nodes a group has the adapters of its own members on a node.
        """
        n = len(ranks)
        if n < 2:
            return 0.0
        latency, rate = self.ring(ranks)
        return latency + self.passes(kind) * (n - 1) / n * nbytes / rate

    def passes(self, kind: str) -> float:
        """How often the bytes of a collective pass a ring."""
        return self.cluster.overheads.scatter if kind == "reduce_scatter" else TWICE.get(kind, 1.0)

    def ring(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of all its steps, and bytes a second that a rank receives."""
        links, nodes = self.links, len({rank // self.per_node for rank in ranks})
        members = max(1, len(ranks) // nodes)
        rate, latency = self._inside(members), links.inside.latency_us
        if nodes > 1:
            through = links.between.gb_per_s * members
            rate, latency = (min(rate, through) if members > 1 else through), links.between.latency_us
        return (len(ranks) - 1) * latency / 1e6, rate * 1e9

    def _inside(self, members: int) -> float:
        """GB a second that one of so many ``members`` of a group on a node receives from the others."""
        inside, lines = self.links.inside, (self.cluster.devices_per_node or 1) - 1
        if not inside.mesh or lines < 2:
            return inside.gb_per_s
        return inside.gb_per_s * (members - 1) / lines

    def message_seconds(self, nbytes: int, sender: int, receiver: int) -> float:
        """From one rank to another."""
        latency, rate = self.link(sender, receiver)
        return latency + nbytes / rate

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Seconds that a message takes to begin, and bytes a second of it."""
        if sender == receiver:
            return 0.0, inf
        same = sender // self.per_node == receiver // self.per_node
        link, rate = (self.links.inside, self._inside(2)) if same else (self.links.between, None)
        return link.latency_us / 1e6, (link.message_gb_per_s or rate or link.gb_per_s) * 1e9


def together(device: float, host: float) -> float:
    """Of both at once."""
    return float((device**TOGETHER + host**TOGETHER) ** (1 / TOGETHER))


def speeds(job: Job) -> Speeds | None:
    """Of the cluster of a request; ``None`` where nobody says them."""
    return speeds_of(job.cluster, job.train.precision, job.launch.nproc)


def speeds_of(cluster: Cluster, precision: str, per_node: int | None = None) -> Speeds | None:
    """With so many ranks ``per_node``, or one for each device.

    A precision that is not listed is as slow as the slowest.
    """
    if cluster.links is None:
        return None
    assert cluster.tflops is not None
    assert cluster.efficiency is not None
    assert cluster.devices_per_node is not None
    assert cluster.memory_gb_per_s is not None
    tflops = {str(name): rate for name, rate in cluster.tflops.items()}
    return Speeds(
        cluster=cluster,
        links=cluster.links,
        peak=tflops.get(precision, min(tflops.values())) * 1e12,
        efficiency=cluster.efficiency,
        memory=cluster.memory_gb_per_s * cluster.kernels.memory * 1e9,
        per_node=per_node or cluster.devices_per_node,
        cores=cluster.cores_per_node,
    )
