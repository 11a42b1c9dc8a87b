"""How the state of an optimizer is laid out where it has not the shape of its parameter."""

from __future__ import annotations

from dataclasses import replace

from launcher.plan.values.layout import Layout


def factor(key: str, layout: Layout) -> Layout | None:
    """Of a row or a column that Adafactor keeps of a parameter laid out as ``layout``; ``None`` of others.

    Each is cut as the parameter is along the dim that it has.

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
