"""Where every tensor of the model lives: its layout and its copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from launcher.job.schema.parallel import Hsdp
from launcher.plan.cut.stages import Stage
from launcher.plan.sizes import Sizes
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Layout
from launcher.plan.values.model_graph import ModelStructure, Param, Role
from launcher.plan.values.module_names import owner
from launcher.plan.values.precision import HALF
from launcher.plan.values.tensor_spec import TensorSpec

ROLES: tuple[Role, ...] = ("embedding", "head", "adapter")
"""A tensor that has several roles counts as the first of them."""


@dataclass(frozen=True)
class Placed:
    """A tensor of the model with its layout and the stages that hold it.

    ``name`` is its first name, ``names`` are all its names. ``stages`` are the virtual stages that hold it.
    ``spec`` has the dtype in which it is kept, ``compute`` is the dtype in the forward. ``role`` is its role
    in the model under any of its names, as in ``model_graph.Param``.
    """

    name: str
    names: tuple[str, ...]
    spec: TensorSpec
    layout: Layout
    stages: tuple[int, ...]
    trainable: bool
    buffer: bool
    compute: str
    role: Role = ""

    @property
    def half(self) -> bool:
        """True if it is kept in half precision, as frozen parameters may be: they are never updated."""
        return not self.trainable and not self.buffer and self.spec.dtype in HALF

    @property
    def sharded(self) -> bool:
        """True if it is sharded over data-parallel ranks, and so gathered before use."""
        return "dp_shard" in self.layout.axes

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of what a rank uses: the full tensor, or its part of what ``tp`` cuts."""
        tp = self.layout.grid["tp"]
        dims = zip(self.spec.shape, self.layout.split, strict=True)
        return tuple(n // tp if "tp" in axes else n for n, axes in dims)

    @property
    def elements(self) -> int:
        """The number of elements that a rank uses."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of what a rank uses, in the dtype in which it is kept."""
        return self.elements * ITEMSIZE[self.spec.dtype]

    @property
    def padded(self) -> int:
        """The elements of all shards together, each padded to the size of the largest."""
        first, *rest = self.shape
        shard = self.layout.grid["dp_shard"]
        return -(-first // shard) * shard * prod(rest)

    @property
    def gathered(self) -> int:
        """The bytes of what a rank uses, in the dtype of the forward."""
        return self.elements * ITEMSIZE[self.compute]

    def copies(self, here: tuple[int, ...]) -> tuple[int, ...]:
        """Returns which of a rank's virtual stages (``here``) keep a separate copy.

        Stages of one rank share an unsharded parameter. FSDP2 does not let two of its roots share a
        parameter, so each stage has its own copy of a sharded one; each also has its own copy of a buffer.
        """
        mine = tuple(s for s in here if s in self.stages)
        return mine if self.sharded or self.buffer else mine[:1]


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold: its gradients are summed over the copies; the first is saved.

    ``ranks`` are the pipeline ranks of the stages, ascending. Without ``trained`` it has no gradients.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    trained: bool = True


def placed(
    skeleton: ModelStructure,
    stages: tuple[Stage, ...],
    sizes: Sizes,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]] | None = None,
    low: str | None = None,
    unsharded: frozenset[str] = frozenset(),
) -> tuple[Placed, ...]:
    """Places every tensor of the model once, in definition order.

    Args:
        skeleton: the model.
        stages: its stages.
        sizes: the grid, and the rank of each stage.
        hsdp: how to shard over data-parallel ranks; ``None``: not at all.
        splits: the axes over which operators cut dims, by any name of a parameter.
        low: the half-precision dtype to compute in, if any.
        unsharded: names of tensors that must not be sharded.
    """
    same: dict[str, list[Param]] = {}
    for p in skeleton.params:
        same.setdefault(p.same_as, []).append(p)

    # an FSDP2 group has one dtype, and all of it is cast, so some tensors cannot be in a group
    kept = full_precision_names(skeleton)
    apart = {name: bool(low) and name in kept for name in same}
    usual = _usual(skeleton)
    alone = {n for n, ps in same.items() if apart[n] or n in unsharded or ps[0].spec.dtype != usual}

    out = []
    has = {s.index: {*s.params} for s in stages}
    for name, ps in same.items():
        sharding = None if name in alone else hsdp
        compute = None if apart[name] else low
        at = tuple(i for i, names in has.items() if not names.isdisjoint(p.name for p in ps))
        out.append(_placed(ps, at, sizes, hsdp=sharding, splits=splits or {}, low=compute))
    return tuple(out)


def _usual(skeleton: ModelStructure) -> str:
    """Returns the dtype of most parameters, by bytes: an FSDP2 group has only one dtype."""
    sizes: dict[str, int] = {}
    for p in skeleton.params:
        if not p.buffer and "float" in p.spec.dtype:
            sizes[p.spec.dtype] = sizes.get(p.spec.dtype, 0) + p.spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def full_precision_names(skeleton: ModelStructure) -> frozenset[str]:
    """Returns the first names of tensors that are never cast to half precision.

    These are buffers, and the parameters of modules with running statistics: BatchNorm takes half-precision
    inputs, but its weights must have the dtype of its statistics.
    """
    statistics = {owner(p.name) for p in skeleton.params if p.buffer and p.spec.dtype.startswith("float")}
    return frozenset(p.same_as for p in skeleton.params if p.buffer or owner(p.name) in statistics)


def _placed(
    ps: list[Param],
    stages: tuple[int, ...],
    sizes: Sizes,
    *,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]],
    low: str | None,
) -> Placed:
    names = tuple(p.name for p in ps)
    spec = ps[0].spec
    if low and all(p.stored == low for p in ps):  # a wider dtype would hold the same numbers
        spec = TensorSpec(spec.shape, low)

    # operators cut over tp; FSDP2 then cuts the first dim of the result over data-parallel ranks
    split = next((splits[n] for n in names if n in splits), ((),) * len(spec.shape))
    if _shards(ps[0], sizes, hsdp, split):
        split = ((*split[0], "dp_shard"), *split[1:])

    coords = tuple(sorted({sizes.places[s] for s in stages}))
    layout = Layout(sizes.grid, spec.shape, split, (("pp", coords),))
    compute = low if low and "float" in spec.dtype else spec.dtype
    return Placed(
        name=names[0],
        names=names,
        spec=spec,
        layout=layout,
        stages=stages,
        trainable=ps[0].trainable,
        buffer=ps[0].buffer,
        compute=compute,
        role=next((role for role in ROLES if any(p.role == role for p in ps)), ""),
    )


def _shards(p: Param, sizes: Sizes, hsdp: Hsdp | None, split: tuple[tuple[str, ...], ...]) -> bool:
    """Returns true if FSDP2 shards ``p``.

    Tensors below the threshold, 0-d tensors, empty tensors and buffers are not sharded. With
    ``uneven: whole``, neither are tensors that do not divide evenly.
    """
    if hsdp is None or p.buffer or not p.spec.shape or sizes.grid["dp_shard"] == 1:
        return False
    parts = prod(sizes.grid[axis] for axis in (*split[0], "dp_shard"))
    if hsdp.uneven == "whole" and p.spec.shape[0] % parts:
        return False
    return p.spec.nbytes > 0 and p.spec.nbytes >= hsdp.threshold * 1024


def by_stage(params: Iterable[Placed]) -> dict[int, list[Placed]]:
    """Returns the tensors of each stage that holds any, in definition order."""
    out: dict[int, list[Placed]] = {}
    for p in params:
        for stage in p.stages:
            out.setdefault(stage, []).append(p)
    return out


def ties(params: tuple[Placed, ...]) -> tuple[Tie, ...]:
    """Returns the parameters that several stages hold."""
    shared = [p for p in params if len(p.stages) > 1 and not p.buffer]
    return tuple(Tie(p.name, p.stages, dict(p.layout.at)["pp"], p.trainable) for p in shared)
