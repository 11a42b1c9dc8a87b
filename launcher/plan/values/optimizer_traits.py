"""What an optimizer class of the user's own was seen to do when it was tried on small tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerTraits:
    """``name`` is the class's path; ``broken`` says why it cannot train at all.

    ``rows``: a tensor cut along its first dim gets the same update; ``elements``: so does one cut along any
    dim. ``alone``: a tensor's update depends on no other tensor. ``empty``: a piece without elements does no
    harm. ``unused``: so does a tensor without a gradient. ``draws``: whether it draws random numbers, from
    torch's stream or from somewhere else.

    ``keys`` are those of its state, ``first`` of them after one step; ``odd`` says which state is neither of
    its parameter's shape nor a single number; ``counters`` are the values of a group that it changes itself;
    ``lost``: why an instance that gets this state back goes on to other numbers. ``copies``: tensors of a
    parameter's size that it keeps for each.
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
