"""Hugging Face folders, written from a checkpoint of any layout."""

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
METADATA = {"format": "pt"}  # what transformers asks for
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
    """Write the parameters and buffers of the checkpoint ``src``; ``folder`` appears when complete.

    ``names`` turns our names into theirs, as ``renamed`` does; with ``strict`` each must be matched, else
    ``Report`` lists those left out. A tied tensor is there once, under its first name. ``max_shard_size`` is
    in bytes, or text (``500MB``, ``2GiB``); a larger tensor has a shard of its own. Files ``beside`` (config,
    tokenizer) are copied along, ``texts`` are written by their names. ``trust`` says who must vouch for
    ``src``. ``averaged``: moving averages of weights in their place; ``adapters`` are added to the weights
    that they are beside. ``split_as``: a ``model_type`` whose experts are written one by one, as ``split``
    has it. ``dtype_of`` says what a tensor is written in, by its name in the folder and the dtype that it
    has: numbers are rounded once. ``judge`` sees the folder first; what it raises leaves none. Raises as
    ``transform`` does.
    """
    # everything is checked first
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
    """What is written of the tensor ``name``: by its name there, which part of it; ``None`` all."""
    if theirs not in parts:
        yield theirs, (name, None)
    for piece, box in parts.get(theirs, {}).items():
        yield piece, (name, box if len(box.lo) == 3 else None)  # of a matrix the name alone is another


def _spec(spec: TensorSpec, part: Box | None) -> TensorSpec:
    """Of what is written: of an expert a matrix."""
    return spec if part is None else TensorSpec(part.shape[-2:], spec.dtype)


def _write_beside(new: Path, beside: Sequence[Path], texts: Mapping[str, str]) -> None:
    for path in beside:
        copy(path, new / path.name)
    for name, text in texts.items():
        write_text(new / name, text)


def check_folder(folder: Path, beside: Sequence[Path], overwrite: bool) -> None:
    """Raises as ``write_hf`` does, whatever its source."""
    along = {path.name for path in beside}
    check_destination(
        folder,
        overwrite,
        lambda at: all(_model_file(p) or p.name in along for p in at.iterdir()),
        "folder of a model alone",
    )


def check_beside(beside: Sequence[Path]) -> None:
    """Raises ``ValueError`` for a file that is not there, or cannot have its name beside the model."""
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
    """What ``names`` makes of our names in ``src``.

    Raises ``ValueError`` also when it leaves all of them out.
    """
    new = renamed(ours, names, strict=strict)
    if not new.names:
        raise ValueError(f"names: no tensor of {src} is left to write; the table leaves all of them out")
    return new


def shards(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """In order: a new one where the next tensor would pass ``limit`` bytes.

    At least one, which may be empty.
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
    """By file name, as transformers calls them."""
    if len(parts) == 1:
        return {ONE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index(parts: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    """``model.safetensors.index.json``, as transformers writes it."""
    total = sum(spec.nbytes for part in parts.values() for spec in part.values())
    weights = {name: file for file, part in parts.items() for name in part}
    data = {"metadata": {"total_size": total}, "weight_map": weights}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def size_in_bytes(size: int | str) -> int:
    """As transformers reads it: ``MB`` is a million bytes, ``MiB`` is 2**20.

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
