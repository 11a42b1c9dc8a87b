"""A module that runs again in its backward."""

from __future__ import annotations

from dataclasses import dataclass

BY_OPERATION = ("random",)
"""Kinds whose results dispatch modes keep operation by operation, which is slower in eager code.

The second run skips no call because of them; it only takes the kept numbers instead of drawing new ones.
"""


@dataclass(frozen=True)
class Recomputed:
    """``module``, by its name in the model, runs again in its backward instead of saving its activations.

    ``keep``: kinds of operations (``Recompute.keep``) whose results are kept; none with policy full.
    ``comm``: the second run repeats the collectives of operators over tp; otherwise their results are kept.
    ``restored``: buffers that its forward changes, by their names inside of it: their values are restored
    after the second run.
    """

    module: str
    keep: tuple[str, ...] = ()
    comm: bool = True
    restored: tuple[str, ...] = ()

    @property
    def by_operation(self) -> tuple[str, ...]:
        """The kinds in ``keep`` that require that all kept results are kept operation by operation."""
        return tuple(kind for kind in self.keep if kind in BY_OPERATION)

    @property
    def policy(self) -> str:
        return "selective" if self.keep else "full"
