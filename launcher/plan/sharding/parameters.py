"""The layouts of parameters on the ranks of a stage: as operators use them, and at rest as shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.job.schema.parallel import Hsdp
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout


@dataclass(frozen=True)
class ShardedParam:
    """A parameter and its layouts.

    ``used``: the layout in which operators use it. ``rest``: the layout in which it is kept, with a shard on
    each replica. ``terms``: axes of ``used`` over which its gradient is summed once per step.
    """

    name: str
    spec: TensorSpec
    used: TensorLayout
    rest: TensorLayout
    terms: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether it is sharded, and so gathered before it is used."""
        return self.rest.canonical != self.used.canonical


def at_rest(used: TensorLayout, spec: TensorSpec, hsdp: Hsdp | None) -> TensorLayout:
    """Returns ``used`` with dim 0 cut further, over ``shard_size`` replicas or as many as divide it.

    >>> at_rest(TensorLayout((2, 4), ((0,), ())), TensorSpec((8, 65536), "float32"), Hsdp())
    TensorLayout(matrix=(2, 2, 2), dims=((0, 1, 2), ()), partial=())
    """
    if hsdp is None or not spec.shape or not spec.nbytes or spec.nbytes < hsdp.threshold * 1024:
        return used
    fine = used.canonical.over_primes  # equal layouts get equal shards: stages may share a tied tensor
    most = hsdp.shard_size if hsdp.shard_size > 0 else used.ranks
    left = spec.shape[0] // fine.slices[0]
    chosen: list[int] = []
    for axis in reversed(fine.repeated):  # neighbours first
        ways = prod(fine.matrix[a] for a in (*chosen, axis))
        if ways <= most and left % ways == 0:
            chosen.insert(0, axis)
    return TensorLayout(fine.matrix, ((*fine.dims[0], *chosen), *fine.dims[1:]))


def global_layout(layout: TensorLayout, spec: TensorSpec, pp: int, places: tuple[int, ...]) -> Layout:
    """Returns ``layout`` over the ranks of all ``pp`` stages; ``places``: the stages that hold the tensor."""
    coarse = layout.canonical
    grid = Grid.of(pp=pp, **{f"d{a}": n for a, n in enumerate(coarse.matrix)})
    split = tuple(tuple(f"d{a}" for a in axes) for axes in coarse.dims)
    return Layout(grid, spec.shape, split, (("pp", places),))
