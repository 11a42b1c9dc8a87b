"""What planning needs to know of a model: names, shapes, ties and the glue between its modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip

DTYPE = {"fp32": "float32", "fp64": "float64", "bf16": "float32", "fp16": "float32"}
"""What ``train.precision`` makes of weights, their gradients and the optimizer's state."""

COMPUTE = DTYPE | {"bf16": "bfloat16", "fp16": "float16"}
"""What it makes of the numbers that go through the model."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Param:
    """A parameter or persistent buffer. ``same_as`` is its own name, of a tied tensor the first of its names."""

    name: str
    spec: TensorSpec
    same_as: str
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True)
class Skeleton:
    """A model before tracing: its modules in definition order, its parameters, and what each module is made of.

    ``containers`` are modules without a forward of their own (ModuleList, ModuleDict, Sequential): automatic
    stages look inside them. ``kinds``: of modules that are linear, embedding, norm or elementwise, which.
    """

    modules: tuple[str, ...]
    params: tuple[Param, ...]
    containers: frozenset[str]
    kinds: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Backward:
    """Bytes that a backward needs besides what the forward saved for it.

    ``work``: at its fullest moment. Where it is split, the second half has ``deferred`` flops to do, and ``kept`` bytes
    wait for it: inputs and output gradients of products with a parameter.
    """

    work: int = 0
    kept: int = 0
    deferred: int = 0


@dataclass(frozen=True)
class Node:
    """One value in the glue between named modules.

    ``kind``: ``input``, ``param`` (a parameter or buffer that glue uses directly), ``module`` (a call of the module
    ``target``), ``glue`` (a function or method call) or ``output``. ``out`` lists the tensors it yields, ``None``
    when it yields something that is no tensor or tuple of tensors; ``packed`` when they come as a tuple.
    ``saved`` is bytes kept for backward, ``backward`` what that needs besides, ``flops`` the forward cost, all for one
    micro batch, or for a piece of one; ``left`` those of ``saved`` that later pieces read.
    """

    name: str
    kind: str
    target: str
    inputs: tuple[str, ...]
    out: tuple[TensorSpec, ...] | None
    packed: bool = False
    saved: int = 0
    flops: int = 0
    backward: Backward = Backward()
    left: int = 0


@dataclass(frozen=True)
class Segment:
    """A part of a forward: the call of ``module``, or what runs outside of any ("").

    ``made``: bytes of its outputs; ``left``: those of ``saved`` that later pieces of the sequence read.
    """

    module: str
    saved: int
    backward: Backward = Backward()
    made: int = 0
    left: int = 0


@dataclass(frozen=True)
class Graph:
    """The glue of a model for one micro batch, in execution order.

    ``scopes``: parameters that are used while their own module is not running, each with the deepest module around it
    that always is; ``None`` for one that is never used. ``chains``: units (``naming.units``) that run once, one right
    after the other, and feed each other. ``calls``: how often those modules run that do not run once. ``segments``: of
    an untraced model what its one node is made of.
    """

    nodes: tuple[Node, ...]
    scopes: tuple[tuple[str, str | None], ...] = ()
    chains: tuple[tuple[str, str], ...] = ()
    calls: tuple[tuple[str, int], ...] = ()
    segments: tuple[Segment, ...] = ()

    @cached_property
    def _named(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    def __getitem__(self, name: str) -> Node:
        return self._named[name]
