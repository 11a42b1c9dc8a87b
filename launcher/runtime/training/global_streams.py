"""The global random states of Python and numpy: seeded per rank, saved in its checkpoints as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np

from launcher.checkpoint.tensorfile.blob import Blob
from launcher.plan.settings.checkpoint import STREAM

PYTHON, NUMPY = f"{STREAM}python", f"{STREAM}numpy"


def seed(words: np.ndarray) -> None:
    """Seeds both streams with two 32-bit words."""
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))


def saved() -> dict[str, Blob]:
    """The current states."""
    kind, keys, place, full, kept = np.random.get_state()
    numpy = [str(kind), np.asarray(keys).tolist(), int(place), int(full), float(kept)]
    return {PYTHON: _blob(random.getstate()), NUMPY: _blob(numpy)}


def restore(own: Mapping[str, Blob]) -> None:
    """Restores the states; keeps the current one if an older checkpoint lacks it."""
    if PYTHON in own:
        version, numbers, kept = json.loads(bytes(own[PYTHON].data))
        random.setstate((version, tuple(numbers), kept))
    if NUMPY in own:
        kind, keys, *rest = json.loads(bytes(own[NUMPY].data))
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def _blob(state: object) -> Blob:
    raw = json.dumps(state).encode()
    return Blob.of("uint8", (len(raw),), raw)
