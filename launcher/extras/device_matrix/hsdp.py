"""HSDP over device matrices: shards each parameter over the ranks that repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.plan.resolve.hsdp import LEVEL, LEVELS
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.plan.values.setting import Setting
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many


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
        """True if the parameter is sharded at rest, and so gathered before it is used."""
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
    rows = spec.shape[0] // fine.slices[0]
    chosen: list[int] = []
    for axis in reversed(fine.repeated):  # neighbors first
        ways = prod(fine.matrix[a] for a in (*chosen, axis))
        if ways <= most and rows % ways == 0:
            chosen.insert(0, axis)
    return TensorLayout(fine.matrix, ((*fine.dims[0], *chosen), *fine.dims[1:]))


def global_layout(layout: TensorLayout, spec: TensorSpec, pp: int, places: tuple[int, ...]) -> Layout:
    """Returns ``layout`` over the ranks of all ``pp`` stages; ``places``: the stages that hold the tensor."""
    coarse = layout.canonical
    grid = Grid.of(pp=pp, **{f"d{a}": n for a, n in enumerate(coarse.matrix)})
    split = tuple(tuple(f"d{a}" for a in axes) for axes in coarse.dims)
    return Layout(grid, spec.shape, split, (("pp", places),))


def hsdp_setting(job: Job, params: Iterable[ShardedParam]) -> Iterator[Setting]:
    """Yields the setting of the optimizer level: each parameter is sharded over its own replicas."""
    hsdp = job.parallel.hsdp
    if hsdp is None:
        return
    level = hsdp.optimizer_level
    shared = [p for p in params if p.shared]
    if shared:
        text = f"{LEVELS[level]}; {many(len(shared), 'parameter')} over the ranks that repeat them"
        yield Setting(LEVEL, level, "applied", text)
    else:
        text = "no parameter is sharded: none is repeated, large enough and divisible"
        yield Setting(LEVEL, level, "degraded", text)
