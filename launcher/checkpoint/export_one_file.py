"""Exports a checkpoint as one safetensors file of full tensors."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launcher.checkpoint.cast import cast_chunks
from launcher.checkpoint.foreign.lora_adapters import Adapters, chunks, merged
from launcher.checkpoint.layout.derive_strategy import sources
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import check_outside_checkpoints
from launcher.checkpoint.tensorfile.disk import replaced
from launcher.checkpoint.tensorfile.safetensors import Blob, blob_at, mapped, read_header, write_stream
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.checkpoint.transform import PEAK, Report
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.tensor_spec import TensorSpec

ALIASES = "launcher.aliases"


def export(
    src: Path,
    path: Path,
    trust: Trust = ANYONE,
    averaged: bool = False,
    adapters: Adapters | None = None,
    dtype_of: Callable[[str, str], str] | None = None,
    judge: Callable[[Path], None] | None = None,
) -> Report:
    """Writes every parameter and buffer of the checkpoint ``src``, as a full tensor, to the file ``path``.

    A safetensors file or an empty file at ``path`` is replaced; any other file is refused, and so is a path
    inside a checkpoint. A tied tensor is written once, under its first name, because the format has no
    aliases. ``launcher.aliases`` in the file's metadata is a JSON object that maps each further name to the
    first one; ``read_full`` returns the tensor under all of them.

    Args:
        src: The checkpoint.
        path: The file to write.
        trust: Says which key the MAC of ``src`` must be made with.
        averaged: Write the moving averages of weights instead of the weights.
        adapters: Adapters to add to the weights that they belong to.
        dtype_of: The dtype to write a tensor in, given its name and its dtype.
        judge: Called with the complete file before it gets its final name. If it raises, no file is left.
    """
    check_file(path)
    reader = Reader(open_checkpoint(src, trust))
    strategy = reader.checkpoint.strategy
    entries = strategy.only("param", "buffer").entries if adapters is None else merged(strategy, adapters)
    read_from = sources(src, strategy, averaged)
    reader.check_headers()

    # the tensors of the file, with the dtypes they are written in
    specs = {
        n: TensorSpec(e.spec.shape, dtype_of(n, e.dtype) if dtype_of else e.dtype) for n, e in entries.items()
    }
    aliases = {alias: name for name, entry in entries.items() for alias in entry.aliases}
    metadata = {"format": "pt", ALIASES: json.dumps(aliases)}

    def bytes_of(name: str) -> Iterator[memoryview]:
        pieces = chunks(reader, name, adapters, read_from)
        return cast_chunks(name, pieces, entries[name].dtype, specs[name].dtype)

    # write the file; it gets its final name once it is complete
    make_folder(path.parent)
    with replaced(path) as new:
        done = write_stream(new, specs, bytes_of, metadata)
        if judge is not None:
            judge(new)
    return Report(path, files=1, bytes_read=reader.bytes_read, bytes_written=done.size, peak=PEAK)


def check_file(path: Path) -> None:
    """Raises as ``export`` does for a ``path`` that it cannot write, whatever the source."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, but the export is one file; give a file name in it")
    check_outside_checkpoints(path)
    if path.is_file() and path.stat().st_size:
        try:
            read_header(path)
        except ValueError as error:
            raise FileExistsError(f"{path}: this is not a safetensors file, so it is not replaced") from error


class Full(Mapping[str, Blob]):
    """Maps each name in an exported file to its tensor; bytes are read from disk on first access.

    The memory is copy-on-write: a write changes neither the file nor another ``Full`` of it.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        self._data = mapped(path, mmap.ACCESS_COPY)
        aliases = _aliases(path, self.header.metadata.get(ALIASES, "{}"))
        self._names = {name: name for name in self.header.entries} | aliases
        unknown = sorted({*aliases.values()} - self.header.entries.keys())
        if unknown:
            raise ValueError(f"{path}: {ALIASES} names tensors that do not exist: {', '.join(unknown)}")

    def __getitem__(self, name: str) -> Blob:
        return blob_at(self._data, self.header, self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_full(path: Path) -> Full:
    """Opens an exported file. Raises ``ValueError`` naming the file if it is truncated or not safetensors."""
    return Full(path)


def _aliases(path: Path, text: str) -> dict[str, str]:
    try:
        aliases = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {ALIASES} is not JSON") from error
    if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
        raise ValueError(f"{path}: {ALIASES} is not a mapping of names to names")
    return aliases
