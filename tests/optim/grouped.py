"""The parameters of a plain module, in the groups that a plan would have."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from launcher.job.schema.components import Optim
from launcher.optim.build import Grouped
from launcher.plan.cut.param_groups import param_groups
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.plan.values.tensor_spec import TensorSpec

ALONE = Grid.of(pp=1, dp_replicate=1, dp_shard=1, tp=1)


def tensor(*names: str, shape: tuple[int, ...], trainable: bool = True, buffer: bool = False) -> Placed:
    """A tensor on one rank, not sharded."""
    layout = Layout(ALONE, shape, ((),) * len(shape), ())
    return Placed(names[0], names, TensorSpec(shape, "float32"), layout, (0,), trainable, buffer, "float32")


def grouped(settings: Optim, named: Iterable[tuple[str, nn.Parameter]]) -> Grouped:
    of = dict(named)
    found = param_groups(settings, [tensor(n, shape=tuple(p.shape)) for n, p in of.items()])
    return [(group, [(n, of[n]) for n in group.names]) for group in found]
