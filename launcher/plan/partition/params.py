"""Where every tensor of the model lives: its layout and its copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from launcher.job.schema.parallel import Hsdp
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stage_config import owner
from launcher.plan.partition.stages import Stage
from launcher.plan.values.facts import HALF, ITEMSIZE, Param, Role, Skeleton, TensorSpec
from launcher.plan.values.layout import Layout

ROLES: tuple[Role, ...] = ("embedding", "head", "adapter")
"""Of a tensor that is several, the first."""


@dataclass(frozen=True)
class Placed:
    """One tensor under its first name.

    ``names`` are all its names, ``stages`` the virtual stages that hold it; ``spec`` has the dtype that it is
    kept in, ``compute`` is the one that the forward sees; ``role`` what it is to the model (``facts.Param``),
    under any name.
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
        """Whether it is kept in the half precision that it is computed in: it never learns."""
        return not self.trainable and not self.buffer and self.spec.dtype in HALF

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks share one copy: it is gathered before it is used."""
        return "dp_shard" in self.layout.axes

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of what a rank uses: all of it, or its part of what ``tp`` cuts."""
        tp = self.layout.grid["tp"]
        dims = zip(self.spec.shape, self.layout.split, strict=True)
        return tuple(n // tp if "tp" in axes else n for n, axes in dims)

    @property
    def elements(self) -> int:
        """Of what a rank uses."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of what a rank uses, in the dtype that it is kept in."""
        return self.elements * ITEMSIZE[self.spec.dtype]

    @property
    def padded(self) -> int:
        """Elements of all shards, each as large as the largest."""
        first, *rest = self.shape
        shard = self.layout.grid["dp_shard"]
        return -(-first // shard) * shard * prod(rest)

    @property
    def gathered(self) -> int:
        """Of what a rank uses, in the dtype that the forward sees."""
        return self.elements * ITEMSIZE[self.compute]

    def copies(self, here: tuple[int, ...]) -> tuple[int, ...]:
        """Of a rank's virtual stages, those that keep a copy of their own.

        Stages of one rank share a whole tensor. FSDP2 lets no two of its roots share one, so of a sharded
        tensor every stage has its own.
        """
        mine = tuple(s for s in here if s in self.stages)
        return mine if self.sharded or self.buffer else mine[:1]


@dataclass(frozen=True)
class Tie:
    """A parameter of several stages: gradients are summed over its copies, the first of which is saved.

    ``ranks`` are the pipeline ranks of the stages, ascending. One that is not ``trained`` has no gradients.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    trained: bool = True


def placed(
    skeleton: Skeleton,
    stages: tuple[Stage, ...],
    sizes: Sizes,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]] | None = None,
    low: str | None = None,
    whole: frozenset[str] = frozenset(),
) -> tuple[Placed, ...]:
    """Every tensor once, in definition order.

    ``splits``: the axes that operators cut dims over, by any name. ``low``: the half-precision dtype to
    compute in, if any. ``whole``: names of those that are not to be sharded.
    """
    same: dict[str, list[Param]] = {}
    for p in skeleton.params:
        same.setdefault(p.same_as, []).append(p)

    # what no group of FSDP2's can take: it has one dtype, and is cast as a whole
    kept = wide(skeleton)
    apart = {name: bool(low) and name in kept for name in same}
    usual = _usual(skeleton)
    alone = {n for n, ps in same.items() if apart[n] or n in whole or ps[0].spec.dtype != usual}

    out = []
    for name, ps in same.items():
        sharding = None if name in alone else hsdp
        compute = None if apart[name] else low
        out.append(_placed(ps, stages, sizes, hsdp=sharding, splits=splits or {}, low=compute))
    return tuple(out)


def _usual(skeleton: Skeleton) -> str:
    """The dtype of most parameters, by bytes: a group of FSDP2's has one."""
    sizes: dict[str, int] = {}
    for p in skeleton.params:
        if not p.buffer and "float" in p.spec.dtype:
            sizes[p.spec.dtype] = sizes.get(p.spec.dtype, 0) + p.spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def wide(skeleton: Skeleton) -> frozenset[str]:
    """Names of tensors that no half precision touches: buffers, and what stands beside a running statistic.

    BatchNorm takes half-precision inputs, but wants its weights as wide as its statistics.
    """
    statistics = {owner(p.name) for p in skeleton.params if p.buffer and p.spec.dtype.startswith("float")}
    return frozenset(p.same_as for p in skeleton.params if p.buffer or owner(p.name) in statistics)


def _placed(
    ps: list[Param],
    stages: tuple[Stage, ...],
    sizes: Sizes,
    *,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]],
    low: str | None,
) -> Placed:
    names = tuple(p.name for p in ps)
    held = tuple(s.index for s in stages if not set(names).isdisjoint(s.params))
    spec = ps[0].spec
    if low and all(p.stored == low for p in ps):  # wider it would be the same numbers
        spec = TensorSpec(spec.shape, low)

    # what operators cut over tp, and of that FSDP2 the first dim over data-parallel ranks
    split = next((splits[n] for n in names if n in splits), ((),) * len(spec.shape))
    if _shards(ps[0], sizes, hsdp, split):
        split = ((*split[0], "dp_shard"), *split[1:])

    coords = tuple(sorted({sizes.places[s] for s in held}))
    layout = Layout(sizes.grid, spec.shape, split, (("pp", coords),))
    compute = low if low and "float" in spec.dtype else spec.dtype
    return Placed(
        name=names[0],
        names=names,
        spec=spec,
        layout=layout,
        stages=held,
        trainable=ps[0].trainable,
        buffer=ps[0].buffer,
        compute=compute,
        role=next((role for role in ROLES if any(p.role == role for p in ps)), ""),
    )


def _shards(p: Param, sizes: Sizes, hsdp: Hsdp | None, split: tuple[tuple[str, ...], ...]) -> bool:
    """Tensors below the threshold, 0-d and empty ones and buffers stay whole; uneven ones on request."""
    if hsdp is None or p.buffer or not p.spec.shape or sizes.grid["dp_shard"] == 1:
        return False
    parts = prod(sizes.grid[axis] for axis in (*split[0], "dp_shard"))
    if hsdp.uneven == "whole" and p.spec.shape[0] % parts:
        return False
    return p.spec.nbytes > 0 and p.spec.nbytes >= hsdp.threshold * 1024


def by_stage(params: Iterable[Placed]) -> dict[int, list[Placed]]:
    """What each stage that holds anything has, in definition order."""
    out: dict[int, list[Placed]] = {}
    for p in params:
        for stage in p.stages:
            out.setdefault(stage, []).append(p)
    return out


def ties(params: tuple[Placed, ...]) -> tuple[Tie, ...]:
    """Parameters that several stages hold."""
    shared = [p for p in params if len(p.stages) > 1 and not p.buffer]
    return tuple(Tie(p.name, p.stages, dict(p.layout.at)["pp"], p.trainable) for p in shared)
