"""Refuses targets that the loss cannot compare with the output, before any rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from launcher.errors import RunError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where targets are read: ``when``, as ``step 3``, and of which ``split``."""

    when: str
    split: str


def check_classes(targets: Tensor, indices: Indices, classes: int, ignored: int, at: Place) -> None:
    """Raises ``RunError`` for ``targets`` of the samples ``indices`` that are none of the classes."""
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if wrong.any():
        known = f"{classes} classes: 0 to {classes - 1}, and {ignored} counts for nothing"
        cure = "Look at the data, or give the model more classes"
        raise RunError(f"{_first(targets, wrong, indices, at)}, and the model's output has {known}. {cure}")


def check_shares(targets: Tensor, indices: Indices, at: Place) -> None:
    """The same for what is no number from 0 to 1."""
    wrong = ~((targets >= 0) & (targets <= 1))
    if wrong.any():
        text = _first(targets, wrong, indices, at)
        raise RunError(f"{text}, and the loss bce takes numbers from 0 to 1. Look at the data")


def _first(targets: Tensor, wrong: Tensor, indices: Indices, at: Place) -> str:
    spot, *below = wrong.nonzero()[0].tolist()
    more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    inside = f" at {', '.join(map(str, below))}" if below else ""
    number = targets[(spot, *below)].item()
    return f"{at.when}: the target of {at.split} sample {indices[spot]}{inside} is {number}{more}"
