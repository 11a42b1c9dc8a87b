"""What an optimizer keeps and needs, per parameter group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from launcher.plan.values.layout import Layout


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of the optimizer class at the path ``name``; ``broken`` says why it cannot train at all.

    ``rows``: a tensor that is cut along its first dim gets the same update; ``elements``: so does one that is
    cut along any dim. ``alone``: the update of a tensor depends on no other tensor. ``empty``: it accepts a
    piece without elements. ``unused``: it accepts a tensor without a gradient. ``draws``: whether it draws
    random numbers, from torch's stream or from elsewhere.

    ``keys`` are the keys of its state, ``first`` those that exist after one step. ``odd`` names state that
    has neither the shape of its parameter nor a single element. ``counters``: the values of a parameter group
    that it changes itself. ``lost``: why an instance with restored state computes other updates. ``copies``:
    the number of tensors of a parameter's size that it keeps for each parameter.
    """

    name: str
    broken: str = ""
    rows: bool = True
    elements: bool = True
    alone: bool = True
    empty: bool = True
    unused: bool = True
    draws: Literal["", "torch", "elsewhere"] = ""
    first: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    odd: str = ""
    counters: tuple[str, ...] = ()
    lost: str = ""
    copies: int = 2


def factor_layout(key: str, layout: Layout) -> Layout | None:
    """Returns the layout of a row or column factor of Adafactor; ``None`` for any other ``key``.

    ``layout`` is that of the parameter. A factor is cut as the parameter is, along the dims that it keeps.

    >>> from launcher.plan.values.grid import Grid
    >>> matrix = Layout(Grid.of(dp_shard=2, tp=2), (6, 8), (("dp_shard",), ("tp",)))
    >>> factors = [factor_layout(key, matrix) for key in ("row_var", "col_var")]
    >>> [(one.shape, one.split) for one in factors]
    [((6, 1), (('dp_shard',), ())), ((1, 8), ((), ('tp',)))]
    """
    if key not in ("row_var", "col_var") or len(layout.shape) < 2:
        return None
    dim = len(layout.shape) - (1 if key == "row_var" else 2)
    shape = (*layout.shape[:dim], 1, *layout.shape[dim + 1 :])
    return replace(layout, shape=shape, split=(*layout.split[:dim], (), *layout.split[dim + 1 :]))


OptimizerSettings = tuple[tuple[str, float | str | tuple[float, float]], ...]


@dataclass(frozen=True)
class ParamGroup:
    """The first ``names`` of parameters that share ``settings``; ``key`` is one of ``optim.groups`` or "".

    ``settings`` are all that the optimizer keeps per group. They are not known for a user's optimizer class,
    which groups parameters itself.
    """

    key: str
    settings: OptimizerSettings
    names: tuple[str, ...]
