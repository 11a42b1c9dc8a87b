"""What is timed of a cluster; each measurement is one of these, with its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.plan.prediction.step_work import StepWork
from launcher.plan.values.operations import Operations, Product


@dataclass(frozen=True)
class Multiplied:
    """A product of matrices."""

    precision: str
    product: Product


@dataclass(frozen=True)
class Attended:
    """The forward and the backward of fused attention; ``flops`` of the forward, of what is not masked."""

    precision: str
    flops: int


@dataclass(frozen=True)
class Moved:
    """``copy``: of a large tensor; ``others``: what a block does besides products and attention;
    ``tiny``: a block of tensors so small that only launching takes time.
    """

    what: Literal["copy", "others", "tiny"]
    done: Operations


@dataclass(frozen=True)
class Block:
    """What a block does, on ranks with a core each; ``alone``: on one while the other cores rest."""

    alone: bool


@dataclass(frozen=True)
class Collective:
    """Over so many ``ranks``, of one node or one on each; ``nbytes`` of the whole tensor."""

    link: Literal["inside", "between"]
    kind: str
    nbytes: int
    ranks: int


@dataclass(frozen=True)
class Message:
    """From one rank to the next and back, half of it."""

    link: Literal["inside", "between"]
    nbytes: int


@dataclass(frozen=True)
class Overlap:
    """A product, gradients on the network, and ``both`` at once; in ``turns``: one waits for the other."""

    what: Literal["product", "network", "both", "turns"]


@dataclass(frozen=True)
class Trained:
    """A step of a tiny model: on replicas, or on as many stages."""

    layout: Literal["replicas", "stages"]


@dataclass(frozen=True)
class Taken:
    """No time but a share of it: what others had the core of a rank that computes by itself."""


Timed = Taken | Multiplied | Attended | Moved | Block | Collective | Message | Overlap | Trained
Round = Mapping[Timed, float]
"""Everything once: seconds of each, and what was ``Taken``."""


@dataclass(frozen=True)
class Works:
    """``precision`` of what is trained, and what a step of it has to do on ``replicas`` and on ``stages``."""

    precision: str
    replicas: StepWork
    stages: StepWork


@dataclass(frozen=True)
class Machine(Works):
    """``cores``: where ranks have no devices of their own; ``per_node``: ranks; ``memory_gb``: of a rank."""

    name: str
    memory_gb: float
    per_node: int
    cores: int | None
