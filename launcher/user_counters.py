"""Integers in which an object of the user's counts its calls: in itself, its class, or its file."""

from __future__ import annotations

import sys
from collections.abc import Mapping

MANY = (10, 1000, 1_000_000)
"""How many calls more an object that counts them is tried after."""
LIBRARIES = ("builtins", "launcher", "torch")
"""Packages whose classes keep no state of a user's object."""
Integers = dict[tuple[int, str], int]
"""Integers by the index of their owner and their name."""


def _owners(instance: object) -> list[object]:
    """Returns the objects in which ``instance`` may count: itself, its classes, and their files."""
    kinds = [kind for kind in type(instance).__mro__ if kind.__module__.partition(".")[0] not in LIBRARIES]
    owners = [instance, *kinds, *(sys.modules.get(kind.__module__) for kind in kinds)]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def integers(instance: object) -> Integers:
    """Returns the integers in attributes of ``instance``, of its classes, and of their files."""
    owners = enumerate(map(vars, _owners(instance)))
    return {(at, name): n for at, values in owners for name, n in values.items() if type(n) is int}


def set_integers(instance: object, numbers: Mapping[tuple[int, str], int]) -> None:
    """Sets the integers that ``integers`` returned."""
    owners = _owners(instance)
    for (at, name), n in numbers.items():
        if vars(owners[at]).get(name) != n:
            setattr(owners[at], name, n)
