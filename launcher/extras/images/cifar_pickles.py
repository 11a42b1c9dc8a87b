"""Reads the pickled batches of CIFAR-10 without running code in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from launcher.errors import Problem, RequestError
from launcher.extras.images.cifar_files import LONGEST, RECORD
from launcher.untrusted.files import read_bytes
from launcher.untrusted.pickles import Bounded

Split = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _latin1(text: str, encoding: str) -> bytes:
    """Recovers the bytes that Python 3 wrote as text into a pickle of an old protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


class _Restricted(Bounded):
    """Constructs numpy arrays and plain values only: an unrestricted pickle can call any function."""

    dispatch: ClassVar = Bounded.dispatch | {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.UNICODE)
    }

    _REBUILD = np.empty(0).__reduce__()[0]
    ALLOWED = {  # noqa: RUF012 (never changed)
        ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self.ALLOWED[module, name]


def read_pickle(file: Path) -> Split:
    """Reads a pickled batch. Raises ``RequestError`` if it is not a CIFAR batch."""
    try:
        pixels, labels = _batch(_Restricted(read_bytes(file, LONGEST), encoding="bytes").load())
    except OSError as error:
        raise RequestError((Problem("data.root", f"{file}: {error.strerror}"),)) from error
    except Exception as error:  # a broken pickle can raise anything
        why = "not a pickle of plain data" if isinstance(error, KeyError | IndexError) else error
        text = f"{file}: not a CIFAR-10 batch: {why}; fetch the archive again"
        raise RequestError((Problem("data.root", text),)) from error
    return pixels.reshape(-1, 3, 32, 32), labels.astype(np.uint8)


def _batch(batch: Any) -> Split:
    """Returns the pixels and labels in the pickle, unchanged. Raises ``ValueError``."""
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError("not a dictionary with data and labels")
    if not isinstance(batch[b"data"], np.ndarray) or not _flat(batch[b"labels"]):
        raise ValueError("data is not an array, or labels are not a list of numbers")
    pixels, labels = batch[b"data"], np.asarray(batch[b"labels"])
    if pixels.dtype != np.uint8 or pixels.shape != (*labels.shape, RECORD - 1):
        raise ValueError(f"data is {pixels.dtype} {pixels.shape} for {labels.size} labels")
    return pixels, labels


def _flat(labels: Any) -> bool:
    if isinstance(labels, np.ndarray):
        return True
    return isinstance(labels, list) and all(type(n) is int for n in labels)
