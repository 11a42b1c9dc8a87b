"""Notes what a forward changes of the weights that it computes with, where ranks would train other numbers.

A step may compute with copies: gathered shards, half precision. The stored weights are trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def state_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return numbers that differ once a module has written to a weight, or given it other memory.

    They stay the same if it writes through ``weight.data``.
    """
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


@dataclass(frozen=True)
class LostChanges:
    """Stored weights, by id, of which a module has changed ``requires_grad``, or values, while it ran."""

    toggled: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)

    def note(self, stored: torch.Tensor, used: torch.Tensor, before: tuple[int, int]) -> None:
        """Compare what a module has computed with; ``before``: its ``state_of`` before that."""
        if used.requires_grad != stored.requires_grad:
            self.toggled.add(id(stored))
        if state_of(used) != before:
            self.overwritten.add(id(stored))
