"""Small data files in the real formats."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np

FORMS = {"python": "cifar-10-batches-py", "python 2": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}


def idx_bytes(array: np.ndarray) -> bytes:
    dims = b"".join(n.to_bytes(4) for n in array.shape)
    return bytes((0, 0, 8, array.ndim)) + dims + array.astype(np.uint8).tobytes()


def write_idx(root: Path, suffix: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Six images of 4 x 4 for training and two for the test; returns the six and their labels."""
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    pixels, labels = rng.integers(0, 256, (8, 4, 4)), rng.integers(0, 10, 8)
    for prefix, part in (("train", slice(6)), ("t10k", slice(6, 8))):
        for name, array in (("images-idx3", pixels[part]), ("labels-idx1", labels[part])):
            data = idx_bytes(array)
            file = root / f"{prefix}-{name}-ubyte{suffix}"
            file.write_bytes(gzip.compress(data) if suffix else data)
    return pixels[:6], labels[:6]


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The dictionary as Python 2 wrote it into the published archive: with byte strings, opcode by opcode."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(b"J" + n.to_bytes(4, "little") for n in pixels.shape) + b"t"
    content = b"T" + pixels.nbytes.to_bytes(4, "little") + pixels.tobytes()
    data = array + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"
    marks = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(U\x04data" + data + b"U\x06labels" + marks + b"u."


def cifar_images() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (12, 3, 32, 32)).astype(np.uint8), rng.integers(0, 10, 12)


def write_cifar(root: Path, form: str) -> None:
    """Two images per file, where the real archives have 10 000."""
    root.mkdir(exist_ok=True)
    pixels, labels = cifar_images()
    for i, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        rows, marks = pixels[2 * i : 2 * i + 2].reshape(2, -1), labels[2 * i : 2 * i + 2]
        if form == "binary":
            (root / f"{name}.bin").write_bytes(np.column_stack([marks.astype(np.uint8), rows]).tobytes())
        elif form == "python 2":
            (root / name).write_bytes(python2_pickle(rows, marks.tolist()))
        else:
            batch = {
                b"batch_label": name.encode(),
                b"labels": marks.tolist(),
                b"data": rows,
                b"filenames": [b"a", b"b"],
            }
            (root / name).write_bytes(pickle.dumps(batch, protocol=2))
