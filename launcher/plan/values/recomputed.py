"""Which modules run their forward again in the backward, and what of it they keep."""

from __future__ import annotations

from dataclasses import dataclass


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
    def policy(self) -> str:
        return "selective" if self.keep else "full"
