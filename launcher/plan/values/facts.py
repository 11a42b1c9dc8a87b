"""What planning needs to know of a model: names, shapes, ties and the glue between its modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from launcher.plan.values.operations import NOTHING, Operations

ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2,
    "uint32": 4, "uint64": 8,
}  # fmt: skip

WIDTH = ITEMSIZE | {
    "complex128": 16, "complex32": 4, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "quint8": 1, "qint8": 1, "qint32": 4,
}  # fmt: skip
"""Of what a forward may compute with too, and no checkpoint can hold."""

DTYPE = {"fp32": "float32", "fp64": "float64", "bf16": "float32", "fp16": "float32"}
"""What ``train.precision`` makes of weights, their gradients and the optimizer's state."""

COMPUTE = DTYPE | {"bf16": "bfloat16", "fp16": "float16"}
"""What it makes of the numbers that go through the model."""

HALF = ("bfloat16", "float16")

IGNORED = -100
"""A target that counts for nothing, as in torch."""


def class_dims(output: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Dims that an output may have its classes on for targets of this shape; best first, none if it fits not.

    >>> class_dims((8, 10), (8,)), class_dims((8, 16, 100), (8, 16)), class_dims((8, 4, 6, 5), (8, 6, 5))
    ((1,), (2,), (1,))

    A square could be read both ways:

    >>> class_dims((8, 5, 5), (8, 5)), class_dims((8, 16, 100), (8,))
    ((2, 1), ())
    """
    last = len(output) - 1
    dims = (last,) if last <= 1 else (last, 1)
    return tuple(d for d in dims if d > 0 and (*output[:d], *output[d + 1 :]) == tuple(target))


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTH[self.dtype]


Role = Literal["", "embedding", "head", "adapter"]


@dataclass(frozen=True)
class Param:
    """A parameter or persistent buffer.

    ``same_as`` is its own name, of a tied tensor the first of its names. ``role``: embedding, the weight of
    such a module; head, that of the last linear one that is in no list of layers; adapter, one of
    low rank beside a linear module. ``stored``: the dtype of its numbers in the file that they come from, of
    one that never learns.
    """

    name: str
    spec: TensorSpec
    same_as: str
    trainable: bool = True
    buffer: bool = False
    role: Role = ""
    stored: str = ""


@dataclass(frozen=True)
class ModelTraits:
    """What a model has besides modules and tensors, by first names: what is lost when one is replaced.

    ``hooked``: parameters with hooks; ``backward``: modules with backward hooks; ``synced``: SyncBatchNorm;
    ``twins``: the names of each module that has several; ``shared``: names of tensors that lie in one
    another's memory; ``computed``: attributes made of weights; ``compiled``: modules that the model itself
    has had compiled. ``saying``: modules that say more of themselves (``get_extra_state``). ``for_all``:
    functions by which the constructor has registered hooks for all modules of torch. ``batch_norms``: modules
    that normalize over the samples of a batch in training. ``world``: what the constructor asks of the
    processes that it runs in.
    """

    hooked: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    synced: tuple[str, ...] = ()
    twins: tuple[tuple[str, ...], ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    computed: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    saying: tuple[str, ...] = ()
    for_all: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    world: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skeleton:
    """A model before tracing: modules in definition order, parameters, and what each module is made of.

    ``containers`` are modules without a forward of their own (ModuleList, ModuleDict, Sequential): automatic
    stages look inside them; ``lists`` those of them that nobody can call. ``kinds``: of modules that are
    linear, embedding, norm or elementwise, which.
    """

    modules: tuple[str, ...]
    params: tuple[Param, ...]
    containers: frozenset[str]
    kinds: tuple[tuple[str, str], ...] = ()
    traits: ModelTraits = ModelTraits()
    lists: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Compiled:
    """What a module spares when torch compiles it: bytes and kernels of each pass, and bytes saved."""

    forward: Operations = NOTHING
    backward: Operations = NOTHING
    saved: int = 0


@dataclass(frozen=True)
class Backward:
    """Bytes that a backward needs besides what the forward saved for it.

    ``work``: at its fullest moment; ``summed``: there with the gradients of its weights, where they are new.
    Where it is split, products with a parameter are ``deferred`` to the second half, and ``kept`` bytes wait
    for it: their inputs and output gradients. ``again``: flops of forwards that it runs again, which
    ``spared`` so many bytes; ``sent``: the collectives over tp of these, a kind and its bytes; ``twice``: the
    Python attributes that each of these changes; ``unlike``: modules of which a second one saved other
    tensors. ``operations``: of all of it, what runs again among them. ``compiled``: what it
    spares when it is compiled.
    """

    work: int = 0
    kept: int = 0
    deferred: Operations = NOTHING
    summed: int = 0
    again: int = 0
    spared: int = 0
    sent: tuple[tuple[str, int], ...] = ()
    twice: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    operations: Operations = NOTHING
    compiled: Compiled = Compiled()


@dataclass(frozen=True)
class Node:
    """One value in the glue between named modules.

    ``kind``: ``input``, ``param`` (a parameter or buffer that glue uses directly), ``module`` (a call of the
    module ``target``), ``glue`` (a function or method call) or ``output``. ``out`` lists the tensors it
    yields, ``None`` when it yields something that is no tensor or tuple of tensors; ``packed`` when they come
    as a tuple. ``saved`` is bytes kept for backward, ``backward`` what that needs besides, ``flops`` the
    forward cost, ``operations`` the kernels of that, all for one micro batch, or for a piece of one; ``left``
    those of ``saved`` that later pieces read. Memory is numbered: what it ``reads`` (its inputs and the
    tensors of its module), the memory its value ``lies`` in, what it ``writes`` in place. ``trains`` are the
    inputs that get a gradient through
    it. ``text``: the call with all its constants. ``keys``: of an output of several tensors, where each is in
    a dict or a tuple; of one that no loss can take, what it is, and the Python that takes a tensor out of it.
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
    reads: frozenset[int] = frozenset()
    lies: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    trains: frozenset[str] = frozenset()
    text: str = ""
    operations: Operations = NOTHING
    keys: tuple[str | int, ...] = ()


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
class Change:
    """A parameter or buffer, under all its ``names``, that a forward changes while the modules ``at`` run.

    ``by_data``: into something that depends on the inputs or on random numbers. ``read``: the output depends
    on what it was before. ``kept``: it is changed where it lies, and a backward needs what was there.
    ``once``: to change it twice is to change it once, as with an embedding's ``max_norm``.
    """

    names: tuple[str, ...]
    by_data: bool
    read: bool
    kept: bool
    at: tuple[str, ...]
    once: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Kept:
    """An attribute that is no tensor, and that each forward changes and reads; ``by_data``: by its inputs."""

    name: str
    by_data: bool


@dataclass(frozen=True)
class Inner:
    """Gradients that the forward takes itself while ``module`` runs.

    ``backward``: by ``backward()``, which adds to the weights'. ``crosses``: modules around it of which
    another argument was made of what the gradient is taken of.
    """

    module: str
    backward: bool
    crosses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """``module`` has a table of ``rows`` for ids of the input at ``place``: ``first`` to before ``end``."""

    place: int
    module: str
    rows: int
    first: int
    end: int


@dataclass(frozen=True)
class Effects:
    """What a forward does besides computing.

    ``sparse``: tables whose gradients would be sparse. ``disagree``: operations on tensors of several dtypes
    that take one only, as the model is without ``train.precision`` of less bits. ``reads``: buffers as the
    constructor left them; ``foreign``: shapes of tensors that are neither of the model, nor inputs, nor made
    there. ``grads``: modules that look at the gradient that a backward has left on a parameter.
    ``evaluated``: what a forward in evaluation mode changes; ``mixed``: the modules that then normalize over
    the samples of their batch. ``draws``: modules that draw random numbers in training, by the use of a
    generator of torch; ``dropouts``: those of them that only draw dropout and can be told not to. ``world``:
    modules that ask for the processes that they run in, each with what it asks. ``global_draws``: whether
    numbers come from the global random stream of Python or numpy. ``kept``: what it remembers in Python.
    ``mixing``: what comes of a sample depends on the others of its batch, BatchNorm aside; ``None``: it was
    not tried. ``beyond``: modules that look up more in their table than it has, its rows, and an id of the
    data that has none. ``lookups``: inputs that are ids of tables.
    """

    changes: tuple[Change, ...] = ()
    inner: tuple[Inner, ...] = ()
    sparse: tuple[str, ...] = ()
    disagree: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    foreign: tuple[tuple[int, ...], ...] = ()
    grads: tuple[str, ...] = ()
    evaluated: tuple[Change, ...] = ()
    mixed: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    world: tuple[tuple[str, str], ...] = ()
    global_draws: bool = False
    kept: tuple[Kept, ...] = ()
    mixing: bool | None = None
    beyond: tuple[tuple[str, int, int], ...] = ()
    lookups: tuple[Lookup, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The glue of a model for one micro batch, in execution order.

    ``scopes``: parameters that are used while their own module is not running, each with the deepest module
    around it that always is; ``None`` for one that is never used. ``chains``: units (``naming.units``) that
    run once, one right after the other, and feed each other. ``calls``: how often those modules run that do
    not run once. ``segments``: of an untraced model what its one node is made of. ``order``: modules as they
    begin (True) and end. ``looks``: modules whose own code looks at data, so that what runs inside of them
    may differ from rank to rank. ``steers``: units themselves were seen to run, or not, or in another order,
    with other numbers. ``overwrites``: modules that change their inputs in place. ``recomputed``: modules
    around several units that one checkpoint runs again. ``nested``: modules that run inside of themselves.
    ``inferred``: those that run in inference mode. ``fills``: those that change a list or dictionary that
    they are given. ``lazy``: those that return a generator. ``toggles``: parameters of which a forward says
    whether they require a gradient. ``swapped``: modules that are called with other parameters than theirs.
    """

    nodes: tuple[Node, ...]
    scopes: tuple[tuple[str, str | None], ...] = ()
    chains: tuple[tuple[str, str], ...] = ()
    calls: tuple[tuple[str, int], ...] = ()
    segments: tuple[Segment, ...] = ()
    order: tuple[tuple[str, bool], ...] = ()
    looks: tuple[str, ...] = ()
    steers: bool = False
    effects: Effects = Effects()
    overwrites: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()
    toggles: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()

    @cached_property
    def _named(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    def __getitem__(self, name: str) -> Node:
        return self._named[name]
