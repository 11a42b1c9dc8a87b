"""Which forwards torch compiles, and how."""

from __future__ import annotations

from dataclasses import dataclass

INDUCTOR = "inductor"
STAGE = ""
"""The name that a whole stage goes by among the compiled modules."""


@dataclass(frozen=True)
class Compilation:
    """``modules`` by their names in the model, each forward by itself; ``STAGE`` is every stage as one piece.

    ``fullgraph``: each is one graph, or the run fails; otherwise what torch cannot compile runs as it is.
    ``dynamic``: ``None`` leaves it to torch. ``timeout_s``: how long ranks wait for each other in the first
    step, which compiles. ``loss``: that of training is compiled too, where it is worked out.
    """

    modules: tuple[str, ...]
    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool | None
    timeout_s: float
    loss: bool = False

    @property
    def joins(self) -> bool:
        """Whether kernels are joined; other backends may run each operation as it is."""
        return self.backend == INDUCTOR
