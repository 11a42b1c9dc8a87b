"""Which modules run their forward again in the backward, and what of it they keep."""

from __future__ import annotations

from dataclasses import dataclass

BY_OPERATION = ("random",)
"""Kinds whose results are kept operation by operation, by dispatch modes, which is slower in eager code.

No call is left out in the second run for their sake: numbers that are kept are not drawn again.
"""


@dataclass(frozen=True)
class Recomputed:
    """``module``, by its name in the model, runs again in its backward instead of saving what that needs.

    ``keep``: kinds of operations (``Recompute.keep``) whose results are kept; none with policy full.
    ``comm``: what operators over tp have sent is sent again; otherwise what came of it is kept. ``restored``:
    buffers that its forward changes, by their names inside of it: they are put back after the second run.
    """

    module: str
    keep: tuple[str, ...] = ()
    comm: bool = True
    restored: tuple[str, ...] = ()

    @property
    def by_operation(self) -> tuple[str, ...]:
        """The kinds of ``keep`` for which all that is kept of the module is kept operation by operation."""
        return tuple(kind for kind in self.keep if kind in BY_OPERATION)

    @property
    def policy(self) -> str:
        return "selective" if self.keep else "full"
