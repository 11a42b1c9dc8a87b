"""Writes outputs to one file, samples in order: each rank writes its part, then one joins them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.tensorfile.disk import clear, replaced
from launcher.checkpoint.tensorfile.safetensors import (
    Blob,
    FileWriter,
    blob_at,
    mapped,
    read_header,
    write_stream,
)
from launcher.checkpoint.tensorfile.watched_folder import open_file
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.runtime.training.checkpoint_tensors import blob, unpacked

OUTPUT = "output"
"""The name of the tensor."""


@dataclass(frozen=True)
class SampleParts:
    """Assigns samples to data-parallel parts: each batch has ``parts`` parts of ``size`` samples.

    ``samples`` is the total; the last batch may be shorter.
    """

    samples: int
    parts: int
    size: int

    def row_ranges(self) -> Iterator[tuple[int, int]]:
        """Yields part and number of samples, in the order of the samples."""
        remaining = self.samples
        while remaining:
            for part in range(self.parts):
                n = min(self.size, remaining)
                remaining -= n
                if n:
                    yield part, n

    def count(self, part: int) -> int:
        """Returns the number of samples of one part."""
        return sum(n for p, n in self.row_ranges() if p == part)


def part_file(folder: Path, part: int) -> Path:
    return folder / f"part{part:05d}.safetensors"


def write_part(path: Path, rows: int, outputs: Iterable[Tensor]) -> None:
    """Writes ``outputs``, which have ``rows`` samples in total along dim 0; no file if there are none.

    Raises ``OSError``.
    """
    blobs = map(blob, outputs)
    first = next(blobs, None)
    if first is None:
        return
    spec = TensorSpec((rows, *first.shape[1:]), first.dtype)
    with FileWriter(path, {OUTPUT: spec}, {}) as file:
        at = file.header.entries[OUTPUT].start
        for piece in chain([first], blobs):
            file.write(at, piece.data)
            at += piece.data.nbytes
        assert at == file.header.entries[OUTPUT].stop, (at, rows)


def join_parts(folder: Path, parts: SampleParts, to: Path) -> int:
    """Joins all parts into ``to`` and deletes them; returns its size. ``to`` appears only when complete."""
    files = {p: part_file(folder, p) for p in range(parts.parts) if parts.count(p)}
    blobs = {p: blob_at(mapped(path), read_header(path), OUTPUT) for p, path in files.items()}
    with replaced(to) as new:
        _jsonl(new, parts, blobs) if to.suffix == ".jsonl" else _safetensors(new, parts, blobs)
        size = new.stat().st_size
    clear(folder)
    return size


def _pieces(parts: SampleParts, blobs: Mapping[int, Blob]) -> Iterator[Blob]:
    """Yields the parts' pieces in the order of the samples."""
    at = dict.fromkeys(blobs, 0)
    for part, n in parts.row_ranges():
        source = blobs[part]
        row = source.data.nbytes // source.shape[0]
        start = at[part]
        at[part] += n
        yield Blob.of(source.dtype, (n, *source.shape[1:]), source.data[start * row : at[part] * row])


def _safetensors(path: Path, parts: SampleParts, blobs: Mapping[int, Blob]) -> None:
    first = next(iter(blobs.values()))
    spec = TensorSpec((parts.samples, *first.shape[1:]), first.dtype)
    write_stream(
        path,
        {OUTPUT: spec},
        lambda _: (p.data for p in _pieces(parts, blobs)),
        {"format": "pt"},
        digested=False,
    )


def _jsonl(path: Path, parts: SampleParts, blobs: Mapping[int, Blob]) -> None:
    """Writes one line per sample. Raises ``ValueError`` for values that JSON cannot represent."""
    rows = (row for piece in _pieces(parts, blobs) for row in unpacked(piece).to(_wide(piece)).tolist())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_file(path, flags), "w") as file:
        for sample, row in enumerate(rows):
            try:
                line = json.dumps({"sample": sample, OUTPUT: row}, allow_nan=False)
            except ValueError:
                text = (
                    f"the output of sample {sample} has values that are not finite, "
                    "which JSON cannot represent"
                )
                raise ValueError(f"{text}; write a .safetensors file") from None
            file.write(f"{line}\n")


def _wide(piece: Blob) -> torch.dtype:
    """Returns a dtype that holds the values without loss.

    JSON then writes the shortest text that reads the same.
    """
    return torch.float64 if piece.dtype.startswith(("float", "bfloat")) else torch.int64
