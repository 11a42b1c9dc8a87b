"""Refuses targets that the loss cannot handle, and ids outside a table, before ranks have to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from launcher.errors import RunError
from launcher.plan.values.facts import Lookup

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where targets are read: ``when``, such as ``step 3``, and the ``split``."""

    when: str
    split: str


def check_classes(targets: Tensor, indices: Indices, classes: int, ignored: int, at: Place) -> None:
    """Raises ``RunError`` for ``targets`` of the samples ``indices`` that are no class."""
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if wrong.any():
        known = f"{classes} classes: 0 to {classes - 1}, and {ignored} counts for nothing"
        cure = "Look at the data, or give the model more classes"
        raise RunError(f"{_first(targets, wrong, indices, at)}, and the model's output has {known}. {cure}")


def check_shares(targets: Tensor, indices: Indices, at: Place) -> None:
    """Raises ``RunError`` for targets that are not between 0 and 1."""
    wrong = ~((targets >= 0) & (targets <= 1))
    if wrong.any():
        text = _first(targets, wrong, indices, at)
        raise RunError(f"{text}, and the loss bce takes numbers from 0 to 1. Look at the data")


def check_ids(inputs: Sequence[Tensor], indices: Indices, lookups: Sequence[Lookup], at: Place) -> None:
    """Raises ``RunError`` for ids in ``inputs`` that a table of the model has no row for."""
    for table in lookups:
        ids = inputs[table.place]
        wrong = (ids < table.first) | (ids >= table.end)
        if wrong.any():
            text = _first(ids, wrong, indices, at, f"an id of input {table.place}")
            where = table.module or "the model"
            known = f"{where} has a table of {table.rows} rows, for ids from {table.first} to {table.end - 1}"
            more = int(ids.max()) - table.end + 1
            cure = f"give the table at least {table.rows + more} rows" if more > 0 else "mask what is no id"
            raise RunError(f"{text}, and {known}. Look at the data, or {cure}")


def _first(targets: Tensor, wrong: Tensor, indices: Indices, at: Place, what: str = "the target") -> str:
    spot, *below = wrong.nonzero()[0].tolist()
    more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    inside = f" at {', '.join(map(str, below))}" if below else ""
    number = targets[(spot, *below)].item()
    return f"{at.when}: {what} of {at.split} sample {indices[spot]}{inside} is {number}{more}"
