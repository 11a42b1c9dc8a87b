"""Writes Hugging Face folders from a checkpoint of any layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.checkpoint.atomic_folder import check_apart, check_destination, fresh
from launcher.checkpoint.foreign.adapters import Adapters, chunks, merged
from launcher.checkpoint.foreign.cast import cast_chunks
from launcher.checkpoint.foreign.experts import Pieces, split
from launcher.checkpoint.foreign.hf_read import INDEX, ONE
from launcher.checkpoint.foreign.rename import Renamed, Table, renamed
from launcher.checkpoint.layout.derived import sources
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.tensorfile.durable import copy, sync, write_text
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.checkpoint.transform import PEAK, Report
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.layout import Box
from launcher.plan.values.trust import ANYONE, Trust

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
         "TIB": 1 << 40}  # fmt: skip
NONE: Mapping[str, str] = {}
METADATA = {"format": "pt"}  # transformers requires it
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", re.IGNORECASE)
_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def write_hf(
    src: Path,
    folder: Path,
    *,
    names: Table | None = None,
    max_shard_size: int | str = "5GB",
    strict: bool = True,
    overwrite: bool = False,
    beside: Sequence[Path] = (),
    texts: Mapping[str, str] = NONE,
    trust: Trust = ANYONE,
    averaged: bool = False,
    adapters: Adapters | None = None,
    split_as: object = None,
    dtype_of: Callable[[str, str], str] | None = None,
    judge: Callable[[Path], None] | None = None,
) -> Report:
    """Writes the parameters and buffers of the checkpoint ``src``; ``folder`` appears when it is complete.

    A tied tensor is written once, under its first name. Raises as ``transform`` does.

    Args:
        src: The checkpoint.
        folder: The folder to write.
        names: Maps our names to the folder's, see ``renamed``.
        max_shard_size: In bytes, or as text (``500MB``, ``2GiB``). A larger tensor gets its own shard.
        strict: Each name must match a row of ``names``; otherwise ``Report`` lists those that are left out.
        overwrite: Replace a folder that has a model alone.
        beside: Files to copy into the folder (config, tokenizer).
        texts: Further files to write, by name.
        trust: Who must vouch for ``src``.
        averaged: Write the moving averages of weights instead of the weights.
        adapters: Adapters to add to the weights that they belong to.
        split_as: A ``model_type`` whose experts are written one by one, see ``split``.
        dtype_of: The dtype to write a tensor in, given its name in the folder and its dtype. Values are
            rounded once.
        judge: Called with the complete folder before it gets its final name. If it raises, no folder is left.
    """
    # check everything first
    limit = size_in_bytes(max_shard_size)
    check_apart(src, folder)
    check_beside(beside)
    check_folder(folder, (*beside, *map(Path, texts)), overwrite)
    reader = Reader(open_checkpoint(src, trust))
    strategy = reader.checkpoint.strategy
    entries = strategy.only("param", "buffer").entries if adapters is None else merged(strategy, adapters)
    table = to_theirs(src, entries, names, strict=strict)
    parts = split(split_as, {theirs: entries[name].spec for name, theirs in table.names.items()})
    ours = {piece: at for name, theirs in table.names.items() for piece, at in _pieces(name, theirs, parts)}
    read_from = sources(src, strategy, averaged)
    reader.check_headers()

    specs_of = {n: _spec(entries[name].spec, part) for n, (name, part) in ours.items()}
    new_dtypes = {n: dtype_of(n, spec.dtype) if dtype_of else spec.dtype for n, spec in specs_of.items()}
    files = named(shards({n: TensorSpec(s.shape, new_dtypes[n]) for n, s in specs_of.items()}, limit))

    def bytes_of(piece: str) -> Iterator[memoryview]:
        name, part = ours[piece]
        found = chunks(reader, name, adapters, read_from, part)
        return cast_chunks(name, found, specs_of[piece].dtype, new_dtypes[piece])

    with fresh(folder) as new, WriteBehind() as behind:
        written = 0
        for file, specs in files.items():
            written += write_stream(new / file, specs, bytes_of, METADATA, digested=False, behind=behind).size
        if len(files) > 1:
            write_text(new / INDEX, index(files))
        _write_beside(new, beside, texts)
        behind.wait()
        sync(new)
        if judge is not None:
            judge(new)

    read, left = reader.bytes_read, table.unmatched
    return Report(folder, len(files), bytes_read=read, bytes_written=written, peak=PEAK, left=left)


def _pieces(
    name: str, theirs: str, parts: Mapping[str, Pieces]
) -> Iterator[tuple[str, tuple[str, Box | None]]]:
    """Yields what is written of our tensor ``name``.

    Each item is a name in the folder, our name, and the box to write, ``None`` for the full tensor.
    """
    if theirs not in parts:
        yield theirs, (name, None)
    for piece, box in parts.get(theirs, {}).items():
        yield piece, (name, box if len(box.lo) == 3 else None)  # a matrix is only renamed


def _spec(spec: TensorSpec, part: Box | None) -> TensorSpec:
    """Returns the spec of what is written: a part is one expert's matrix."""
    return spec if part is None else TensorSpec(part.shape[-2:], spec.dtype)


def _write_beside(new: Path, beside: Sequence[Path], texts: Mapping[str, str]) -> None:
    for path in beside:
        copy(path, new / path.name)
    for name, text in texts.items():
        write_text(new / name, text)


def check_folder(folder: Path, beside: Sequence[Path], overwrite: bool) -> None:
    """Raises as ``write_hf`` does for a ``folder`` that it cannot write, whatever the source."""
    along = {path.name for path in beside}
    check_destination(
        folder,
        overwrite,
        lambda at: all(_model_file(p) or p.name in along for p in at.iterdir()),
        "folder of a model alone",
    )


def check_beside(beside: Sequence[Path]) -> None:
    """Raises ``ValueError`` for a file that does not exist, or whose name another file of the folder has."""
    seen = set()
    for path in beside:
        if not path.is_file():
            raise ValueError(f"{path}: no such file to copy beside the model")
        if path.name in seen or _model_file(path):
            raise ValueError(
                f"{path}: the folder has a {path.name} already; it cannot be copied beside the model"
            )
        seen.add(path.name)


def to_theirs(src: object, ours: Iterable[str], names: Table | None, *, strict: bool = True) -> Renamed:
    """Returns the names that our names in ``src`` have by the table ``names``.

    Raises as ``renamed`` does, and ``ValueError`` if the table leaves out all of them.
    """
    new = renamed(ours, names, strict=strict)
    if not new.names:
        raise ValueError(f"names: no tensor of {src} is left to write; the table leaves all of them out")
    return new


def shards(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """Distributes tensors to shards, in order.

    A new shard starts if the next tensor would pass ``limit`` bytes. There is at least one shard, which may
    be empty.
    """
    out: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if out[-1] and size + spec.nbytes > limit:
            out.append({})
            size = 0
        out[-1][name] = spec
        size += spec.nbytes
    return out


def named(parts: Sequence[dict[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    """Returns the shards by the file names that transformers uses."""
    if len(parts) == 1:
        return {ONE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index(parts: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    """Returns the content of ``model.safetensors.index.json``, as transformers writes it."""
    total = sum(spec.nbytes for part in parts.values() for spec in part.values())
    weights = {name: file for file, part in parts.items() for name in part}
    data = {"metadata": {"total_size": total}, "weight_map": weights}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def size_in_bytes(size: int | str) -> int:
    """Parses a size as transformers does: ``MB`` is a million bytes, ``MiB`` is 2**20.

    >>> size_in_bytes("1.5KB"), size_in_bytes("1KiB"), size_in_bytes(7)
    (1500, 1024, 7)
    """
    match = _SIZE.fullmatch(str(size))
    found = 0
    if match is not None:
        found = int(float(match[1]) * UNITS[match[2].upper()])
    elif not isinstance(size, bool):
        with suppress(ValueError):
            found = int(size)
    if found < 1:
        raise ValueError(f"max_shard_size: {size!r} is no size; give bytes, or text as 500MB or 2GiB")
    return found


def _model_file(path: Path) -> bool:
    return path.name == INDEX or _MODEL.fullmatch(path.name) is not None
