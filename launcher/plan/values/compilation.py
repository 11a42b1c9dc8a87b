"""The modules that are compiled, and how."""

from __future__ import annotations

from dataclasses import dataclass

INDUCTOR = "inductor"
STAGE = ""
"""Means each stage as one module in ``Compilation.modules``."""


@dataclass(frozen=True)
class Compilation:
    """The modules that are compiled, each separately, and the arguments of ``torch.compile``.

    ``modules`` are names in the model; ``STAGE`` means each stage as one module. ``fullgraph``: each
    module has to be one graph, or the run fails; otherwise the parts that torch cannot compile run eagerly.
    ``dynamic``: ``None`` leaves the choice to torch. ``timeout_s``: how long, in seconds, ranks wait for each
    other in the first step, which compiles. ``loss``: the training loss is compiled too, on the ranks that
    compute it.
    """

    modules: tuple[str, ...]
    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool | None
    timeout_s: float
    loss: bool = False

    @property
    def fuses(self) -> bool:
        """True if the backend fuses kernels: inductor does; others may run each operation by itself."""
        return self.backend == INDUCTOR
