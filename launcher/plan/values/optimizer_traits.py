"""What a user's optimizer class did when it was tried on small tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
