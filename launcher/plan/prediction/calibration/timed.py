"""The operations that are timed on a cluster; a measurement is one of them with its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.plan.prediction.step_work import StepWork
from launcher.plan.values.operations import Operations, Product


@dataclass(frozen=True)
class Multiplied:
    """A matrix product."""

    precision: str
    product: Product


@dataclass(frozen=True)
class Attended:
    """The forward and backward of fused attention; ``flops``: those of the forward, without masked parts."""

    precision: str
    flops: int


@dataclass(frozen=True)
class Moved:
    """Kernels that move bytes.

    ``copy``: a copy of a large tensor. ``others``: what a block does besides products and attention.
    ``tiny``: a block of tensors so small that only launching takes time.
    """

    what: Literal["copy", "others", "tiny"]
    done: Operations


@dataclass(frozen=True)
class Block:
    """A block on ranks with a core each; ``alone``: on one rank while the other cores are idle."""

    alone: bool


@dataclass(frozen=True)
class Collective:
    """A collective over ``ranks`` ranks of one node, or one on each node; ``nbytes``: the full tensor."""

    link: Literal["inside", "between"]
    kind: str
    nbytes: int
    ranks: int


@dataclass(frozen=True)
class Message:
    """A message from one rank to the next: half of the time there and back."""

    link: Literal["inside", "between"]
    nbytes: int


@dataclass(frozen=True)
class Overlap:
    """A product, gradients on the network, ``both`` at once, or in ``turns``: one waits for the other."""

    what: Literal["product", "network", "both", "turns"]


@dataclass(frozen=True)
class Trained:
    """A step of a tiny model on replicas, or on the same number of stages."""

    layout: Literal["replicas", "stages"]


@dataclass(frozen=True)
class Taken:
    """Not seconds but a share of time: how long others used the core of a rank that computes alone."""


Timed = Taken | Multiplied | Attended | Moved | Block | Collective | Message | Overlap | Trained
Round = Mapping[Timed, float]
"""One measurement of everything: the seconds of each operation, and the share that was ``Taken``."""


@dataclass(frozen=True)
class Works:
    """The tiny models that are trained: their precision, and the work of a step on replicas and on stages."""

    precision: str
    replicas: StepWork
    stages: StepWork


@dataclass(frozen=True)
class Machine(Works):
    """The machine that is measured.

    ``memory_gb``: the memory of a rank; ``per_node``: ranks on a node; ``cores``: cores of a node, if ranks
    are processes that share them instead of having devices.
    """

    name: str
    memory_gb: float
    per_node: int
    cores: int | None
