"""Reports the norms of each rank's local gradients: on the console and in a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.parallel.norms.local_grad_norm import OwnGradients
from launcher.runtime.cluster.value_collectives import gather
from launcher.runtime.cluster.world import World
from launcher.runtime.training.metrics import Metrics

FEW = 4


@dataclass
class LocalNormLog:
    """Logs local norms. ``device``: one number per rank instead of one per parameter.

    ``scale`` undoes the mean over data-parallel ranks.
    """

    own: OwnGradients
    world: World
    emit: Callable[[dict[str, Any]], None]
    print: bool
    dump: Path | None
    device: bool
    scale: float
    _file: Metrics | None = field(default=None, init=False)

    def tell(self, step: int, loud: bool, scaled: float = 1.0) -> None:
        """Reports a step's norms; every rank calls this. ``loud``: the step is one of those to report.

        The step's gradients were multiplied by ``scaled``.
        """
        norms = self.own.take(self.scale / scaled)
        if not loud:
            return
        if self.device:
            norms = {"": math.sqrt(sum(n * n for n in norms.values()))}
        if self.dump is not None:
            self._write(self.dump, step, norms)
        if self.print:
            every = gather(norms, dict[str, float])
            if every is not None:
                self.emit({"text": "\n".join(lines(step, every))})

    def _write(self, folder: Path, step: int, norms: Mapping[str, float]) -> None:
        """Appends to ``rank<N>.jsonl``; drops rows from this step on, of earlier runs or failed attempts."""
        if self._file is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = Metrics(folder / f"rank{self.world.rank}.jsonl", step)
        row = {"norm": norms[""]} if self.device else {"norms": dict(norms)}
        self._file.write({"step": step, **row})


def lines(step: int, every: Sequence[Mapping[str, float]]) -> list[str]:
    """One line per parameter, in the order of the ranks that have it.

    >>> lines(3, [{"w": 0.5, "b": 1.0}, {"w": 0.25}])
    ['local_norm, step 3: w 0.5 on rank 0, 0.25 on rank 1', 'local_norm, step 3: b 1 on rank 0']
    """
    names = list(dict.fromkeys(name for norms in every for name in norms))
    start = f"local_norm, step {step}: "
    return [f"{start}{name and f'{name} '}{_spread(name, every)}" for name in names]  # "": of all parameters


def _spread(name: str, every: Sequence[Mapping[str, float]]) -> str:
    """Each rank's number; for many ranks only the smallest and the largest.

    >>> _spread("w", [{"w": float(n)} for n in range(6)])
    '0 (rank 0) to 5 (rank 5) on 6 ranks'
    """
    found = [(norms[name], rank) for rank, norms in enumerate(every) if name in norms]
    if len(found) <= FEW:
        return ", ".join(f"{n:.4g} on rank {rank}" for n, rank in found)
    (least, first), (most, last) = min(found), max(found)
    return f"{least:.4g} (rank {first}) to {most:.4g} (rank {last}) on {len(found)} ranks"
