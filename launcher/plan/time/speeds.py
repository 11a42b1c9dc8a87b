"""The speeds of a cluster's devices and links: seconds of kernels, collectives and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from launcher.job.schema.cluster import Cluster, Links
from launcher.job.schema.job import Job
from launcher.plan.values.operations import Operations, Product

TOGETHER = 4
"""The exponent n of overlapping host and device work: it takes (device**n + host**n)**(1/n).

That is a little more than the longer of the two.
"""
FLASH_BACKWARD = 0.8
"""The speed of attention's backward as a fraction of the speed of its forward: the backward waits more."""
TWICE = {"all_reduce": 2.0}
"""How often the bytes pass the ring, for collectives whose bytes pass it more than once."""


@dataclass(frozen=True)
class Speeds:
    """The speeds of a rank.

    ``peak``: FLOP per second of matrix products in the precision of the request. ``efficiency``: the share of
    it that large products reach. ``memory``: bytes per second. ``per_node``: consecutive ranks on a node.
    ``cores``: the cores of a node, if ranks are processes that share them instead of having devices.
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
        """Returns the seconds of kernels that run one after the other."""
        attention = done.attention / self.attention
        products = sum(n * self._product(p) for p, n in done.products)
        moved = done.moved * self.cluster.kernels.moved / self.memory
        return products + attention / (FLASH_BACKWARD if backward else 1) + moved

    def host_seconds(self, kernels: int) -> float:
        """Returns the seconds that the host takes to launch this many kernels."""
        return kernels * self.cluster.kernels.launch_us / 1e6

    def _product(self, p: Product) -> float:
        if 0 in (p.m, p.n, p.k):  # a tensor without elements
            return 0.0
        short = self.cluster.kernels.small * (1 / p.m + 1 / p.n + 1 / p.k)
        return max(p.flops / (self.peak * self.efficiency) * (1 + short), p.nbytes / self.memory)

    def collective_seconds(self, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective around a ring over ``ranks``.

        ``nbytes`` are those of the full tensor. Between nodes, a group uses the network adapters of its own
        members on each node.
        """
        n = len(ranks)
        if n < 2:
            return 0.0
        latency, rate = self.ring(ranks)
        return latency + self.passes(kind) * (n - 1) / n * nbytes / rate

    def passes(self, kind: str) -> float:
        """Returns how often the bytes of a collective pass a ring."""
        return self.cluster.overheads.scatter if kind == "reduce_scatter" else TWICE.get(kind, 1.0)

    def ring(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Returns the latency of all steps of a ring in seconds, and the bytes per second of a rank."""
        links, nodes = self.links, len({rank // self.per_node for rank in ranks})
        members = max(1, len(ranks) // nodes)
        rate, latency = self._inside(members), links.inside.latency_us
        if nodes > 1:
            through = links.between.gb_per_s * members
            rate, latency = (min(rate, through) if members > 1 else through), links.between.latency_us
        return (len(ranks) - 1) * latency / 1e6, rate * 1e9

    def _inside(self, members: int) -> float:
        """Returns the GB per second that a rank receives from other ``members`` of a group on its node."""
        inside, lines = self.links.inside, (self.cluster.devices_per_node or 1) - 1
        if not inside.mesh or lines < 2:
            return inside.gb_per_s
        return inside.gb_per_s * (members - 1) / lines

    def message_seconds(self, nbytes: int, sender: int, receiver: int) -> float:
        """Returns the seconds of a message from one rank to another."""
        latency, rate = self.link(sender, receiver)
        return latency + nbytes / rate

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Returns the latency of a message in seconds, and its bytes per second."""
        if sender == receiver:
            return 0.0, inf
        same = sender // self.per_node == receiver // self.per_node
        link, rate = (self.links.inside, self._inside(2)) if same else (self.links.between, None)
        return link.latency_us / 1e6, (link.message_gb_per_s or rate or link.gb_per_s) * 1e9


def together(device: float, host: float) -> float:
    """Returns the seconds of device and host work that overlap."""
    return float((device**TOGETHER + host**TOGETHER) ** (1 / TOGETHER))


def speeds(job: Job) -> Speeds | None:
    """Returns the speeds of the cluster of a request, or ``None`` if it does not state them."""
    return speeds_of(job.cluster, job.train.precision, job.launch.nproc)


def speeds_of(cluster: Cluster, precision: str, per_node: int | None = None) -> Speeds | None:
    """Returns the speeds of a cluster, or ``None`` if it does not state them.

    ``per_node``: ranks on a node; ``None``: one for each device. A precision that the cluster does not list
    is as slow as its slowest one.
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
