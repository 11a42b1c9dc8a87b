"""Optimizer states laid out as the parameters that they belong to."""

from __future__ import annotations

from dataclasses import replace

from launcher.checkpoint.layout.strategy import Entry, Strategy


def followed(target: Strategy, src: Strategy) -> Strategy:
    """``target`` with the optimizer states of ``src`` that it does not list, each where its parameter is.

    A state of another shape than its parameter (a step counter) is whole on every rank that holds the parameter.
    """
    entries = dict(target.entries)
    for name, entry in src.entries.items():
        param = name.split(".", 2)[2] if name.startswith("optim.") and name.count(".") > 1 else ""
        if entry.kind != "optim" or name in target.named or param not in target.named:
            continue
        layout = target.entries[target.named[param]].layout
        if layout.shape != entry.layout.shape:
            shape = entry.layout.shape
            layout = replace(layout, shape=shape, split=((),) * len(shape))
        entries[name] = Entry(layout, entry.dtype, "optim")
    return Strategy(target.grid, entries)
