"""The layout of optimizer state that does not have the shape of its parameter."""

from __future__ import annotations

from dataclasses import replace

from launcher.plan.values.layout import Layout


def factor(key: str, layout: Layout) -> Layout | None:
    """Returns the layout of a row or column factor of Adafactor; ``None`` for any other ``key``.

    ``layout`` is that of the parameter. A factor is cut as the parameter is, along the dims that it keeps.

    >>> from launcher.plan.values.grid import Grid
    >>> matrix = Layout(Grid.of(dp_shard=2, tp=2), (6, 8), (("dp_shard",), ("tp",)))
    >>> [(one.shape, one.split) for one in (factor("row_var", matrix), factor("col_var", matrix))]
    [((6, 1), (('dp_shard',), ())), ((1, 8), ((), ('tp',)))]
    """
    if key not in ("row_var", "col_var") or len(layout.shape) < 2:
        return None
    dim = len(layout.shape) - (1 if key == "row_var" else 2)
    shape = (*layout.shape[:dim], 1, *layout.shape[dim + 1 :])
    return replace(layout, shape=shape, split=(*layout.split[:dim], (), *layout.split[dim + 1 :]))
