"""Refuses targets that are none of the model's classes, before any rank waits for another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from launcher.errors import RunError
from launcher.plan.values.facts import IGNORED


def check(targets: Tensor, indices: npt.NDArray[np.int64], classes: int, where: str, split: str) -> None:
    """``targets`` are those of the samples ``indices`` of ``split``. Raises ``RunError``."""
    wrong = ((targets < 0) & (targets != IGNORED)) | (targets >= classes)
    if not wrong.any():
        return
    at = wrong.nonzero()[0].tolist()
    more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    spot = f" at {', '.join(map(str, at[1:]))}" if at[1:] else ""
    number = targets[tuple(at)].item()
    text = f"{where}: the target of {split} sample {indices[at[0]]}{spot} is {number}{more}"
    known = f"{classes} classes: 0 to {classes - 1}, and {IGNORED} counts for nothing"
    cure = "Look at the data, or give the model more classes"
    raise RunError(f"{text}, and the model's output has {known}. {cure}")
