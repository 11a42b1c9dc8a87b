"""Reads and writes Hugging Face folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from launcher.checkpoint.box_bytes import box_index
from launcher.checkpoint.cast import cast_chunks
from launcher.checkpoint.foreign.lora_adapters import Adapters, chunks, merged
from launcher.checkpoint.foreign.names import Renamed, Table, renamed
from launcher.checkpoint.full_tensors import FullTensors
from launcher.checkpoint.layout.derive_strategy import sources
from launcher.checkpoint.layout.shards import full_box
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import check_apart, check_destination, fresh
from launcher.checkpoint.tensorfile.disk import WriteBehind, copy, sync, write_text
from launcher.checkpoint.tensorfile.safetensors import (
    Blob,
    Header,
    blob_at,
    mapped,
    read_header,
    write_stream,
)
from launcher.checkpoint.transform import PEAK, Report
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import RefusedFile, read_json, stands

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OPEN = 64  # shards mapped at once


class HfFolder(Mapping[str, Blob]):
    """Maps names to tensors, except those that the table leaves out. Bytes are read on first access.

    ``unmatched`` are the names in the folder that no row of the table matches.
    """

    def __init__(self, headers: Mapping[Path, Header], table: Table | None, *, strict: bool) -> None:
        where = {name: path for path, header in headers.items() for name in header.entries}
        new = renamed(where, table, strict=strict)
        self.unmatched = new.unmatched
        self._headers = headers
        self._where = {name: (where[old], old) for old, name in new.names.items()}
        self._map = lru_cache(maxsize=OPEN)(mapped)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: self._headers[path].entries[old].spec for name, (path, old) in self._where.items()}

    def __getitem__(self, name: str) -> Blob:
        path, old = self._where[name]
        return blob_at(self._map(path), self._headers[path], old)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_hf(path: Path, names: Table | None = None, *, strict: bool = True) -> HfFolder:
    """Opens the folder ``path``, or one safetensors file. ``names`` maps its names to ours, see ``renamed``.

    Every header is read and checked. Raises ``ValueError`` naming the file. With ``strict``, unmatched names
    raise it too.
    """
    if stands(path):
        return HfFolder({path: read_header(path)}, names, strict=strict)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")

    # one file, or several with an index
    one = path / SINGLE_FILE
    index = path / INDEX
    if stands(one) and stands(index):
        raise ValueError(f"{path}: both {SINGLE_FILE} and {INDEX} exist and may differ; remove one of them")
    if stands(one):
        return HfFolder({one: read_header(one)}, names, strict=strict)
    if stands(index):
        return HfFolder(_shards(index), names, strict=strict)

    if pickles := sorted(p.name for p in path.glob("*.bin")):
        raise ValueError(
            f"{path}: it has only pickles, which are never loaded ({', '.join(pickles)}); save safetensors"
        )
    raise ValueError(f"{path}: it has neither {SINGLE_FILE} nor {INDEX}")


def model_type(folder: Path) -> object:
    """Returns ``model_type`` of the folder's ``config.json``. Raises as ``read_json`` does."""
    data = read_json(folder / CONFIG, unique=True)
    return data.get("model_type") if isinstance(data, dict) else None


def named_dtype(folder: Path) -> str | None:
    """Returns the dtype in the folder's ``config.json``: ``dtype`` or, in older ones, ``torch_dtype``."""
    data = read_json(folder / CONFIG, unique=True)
    inner = data.get("text_config") if isinstance(data, dict) else None
    of = [part for part in (data, inner) if isinstance(part, dict)]
    dtypes = (part.get(key) for part in of for key in ("dtype", "torch_dtype"))
    return next((name for name in dtypes if isinstance(name, str)), None)


def _shards(index: Path) -> dict[Path, Header]:
    weights = _weight_map(index)
    for file in dict.fromkeys(weights.values()):
        if not _plain(file):
            raise ValueError(f"{index}: {file} is not the name of a .safetensors file in this folder")
        if not stands(index.parent / file):
            raise ValueError(f"{index}: shard {file} is missing")

    headers = {file: read_header(index.parent / file) for file in sorted({*weights.values()})}
    differences = [*_differences(weights, headers)]
    if differences:
        raise ValueError("\n".join(f"{index}: {f}" for f in differences))
    return {index.parent / file: header for file, header in headers.items()}


def _differences(weights: Mapping[str, str], headers: Mapping[str, Header]) -> Iterator[str]:
    homes: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header.entries:
            homes.setdefault(name, []).append(file)

    for name, files in homes.items():
        if len(files) > 1:
            yield f"tensor {name} is in {' and in '.join(files)}"
        elif name not in weights:
            yield f"tensor {name} of {files[0]} is not listed"
    for name, file in weights.items():
        if name not in headers[file].entries:
            yield f"tensor {name} is not in {file}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        data: Any = read_json(index, unique=True)
    except RefusedFile:
        raise
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{index}: not JSON") from error
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from error
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(v, str) for v in files.values()):
        raise ValueError(f"{index}: weight_map is not a mapping of tensor names to file names")
    return files


def _plain(file: str) -> bool:
    return file.endswith(".safetensors") and "/" not in file and "\\" not in file and "\0" not in file


RENAMED = {"embed_out.weight": "lm_head.weight"}
"""Tensor names that transformers changes when it reads a folder. The only one is GPT-NeoX's."""
WRITTEN: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head": "embed_out", "": ""}}
"""The tables for ``renamed``, by ``model_type``. They give names that all versions of transformers read."""
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
"""Masks and rotary frequencies that older versions saved. Models compute them; no weight has such a name."""


def names_in_folder(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """Maps the model's names to the names in a folder, ``theirs``. ``ours`` are all names of the model.

    The folder of a base model, such as GPT-2's, lacks the prefix that names have in a model with a head.
    """
    known = {*ours}
    prefixes = sorted({n.partition(".")[0] for n in known})
    out: dict[str, str] = {}
    for name in theirs:
        may = (name, RENAMED.get(name, name), *(f"{prefix}.{name}" for prefix in prefixes))
        match = next((n for n in may if n in known and (n == name or n not in theirs)), None)
        if match is not None:
            out[match] = name
    return out


def written(model_type: object, theirs: Collection[str]) -> Mapping[str, str] | None:
    """Returns the table that maps the model's names back to those of its folder, which had ``theirs``.

    ``None`` means that no name changes.
    """
    table = WRITTEN.get(str(model_type))
    as_they_are = any(name in theirs for name in RENAMED.values())
    return None if as_they_are else table


def unknown(theirs: Collection[str], matches: Mapping[str, str]) -> list[str]:
    """Returns the names in a folder for which the model has no tensor."""
    used = {*matches.values()}
    return [n for n in theirs if n not in used and not COMPUTED.search(n)]


@dataclass(frozen=True)
class ExpertNames:
    """The names that folders of a model family use for the expert block and for the matrices of an expert."""

    block: str
    gate: str
    up: str
    down: str


SEVERAL = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
FORMS = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"), SEVERAL),
}
"""The names in folders of each ``model_type`` whose experts transformers 5 saves one by one."""
OURS = re.compile(r"(?P<layer>.*)\.mlp\.(?P<what>experts\.gate_up_proj|experts\.down_proj|gate\.weight)")

Pieces = Mapping[str, Box]
"""The tensors of a folder that make up one tensor of the model, each with its box in that tensor."""


def pieces(form: ExpertNames, name: str, shape: tuple[int, ...]) -> dict[str, Box]:
    """Returns the pieces of the model's tensor ``name``; empty if folders store it under this name.

    In ``gate_up_proj``, each expert has the rows of its gate first, then the rows of ``up``.

    >>> boxes = pieces(FORMS["mixtral"], "layers.0.mlp.experts.down_proj", (2, 4, 8))
    >>> [*boxes][1], boxes["layers.0.block_sparse_moe.experts.1.w2.weight"]
    ('layers.0.block_sparse_moe.experts.1.w2.weight', Box(lo=(1, 0, 0), hi=(2, 4, 8)))
    """
    match = OURS.fullmatch(name)
    if match is None:
        return {}
    at = f"{match['layer']}.{form.block}"
    if match["what"] == "gate.weight":
        return {} if form.block == "mlp" else {f"{at}.gate.weight": full_box(shape)}
    count, rows, columns = shape
    halves = (form.down,) if match["what"].endswith(".down_proj") else (form.gate, form.up)
    height = rows // len(halves)
    return {
        f"{at}.experts.{e}.{half}.weight": Box((e, n * height, 0), (e + 1, (n + 1) * height, columns))
        for e in range(count)
        for n, half in enumerate(halves)
    }


def split(model_type: object, specs: Mapping[str, TensorSpec]) -> dict[str, Pieces]:
    """Returns the pieces of each tensor that folders of this model type store in pieces."""
    form = FORMS.get(str(model_type))
    if form is None:
        return {}
    pieces_of = {name: pieces(form, name, spec.shape) for name, spec in specs.items()}
    return {name: parts for name, parts in pieces_of.items() if parts}


@dataclass(frozen=True)
class Joined:
    """The tensors of ``source``, with the tensors ``joined`` in place of their pieces."""

    source: FullTensors
    joined: Mapping[str, TensorSpec]
    parts: Mapping[str, Pieces]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        used = {piece for parts in self.parts.values() for piece in parts}
        return {n: s for n, s in self.source.specs.items() if n not in used} | dict(self.joined)

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        if name not in self.parts:
            return self.source.fill(name, part, out)
        for piece, box in self.parts[name].items():
            both = part & box
            if both is not None:
                there, here = both.within(box), both.within(part)
                matrix = Box(there.lo[-2:], there.hi[-2:])  # the box in one expert's matrix
                self.source.fill(piece, matrix, out[box_index(here)].reshape(matrix.shape))


def joined(source: FullTensors, model_type: object, ours: Mapping[str, TensorSpec]) -> FullTensors:
    """Returns ``source`` with pieces joined to tensors of the model, whose specs are ``ours``.

    A tensor is joined only if ``source`` has all of its pieces, with the right shapes and one dtype.
    """
    specs = source.specs
    pieces_of = {n: parts for n, parts in split(model_type, ours).items() if _fits(specs, parts)}
    if not pieces_of:
        return source
    dtypes = {n: next(specs[piece].dtype for piece in parts) for n, parts in pieces_of.items()}
    return Joined(source, {n: TensorSpec(ours[n].shape, dtypes[n]) for n in pieces_of}, pieces_of)


def _fits(specs: Mapping[str, TensorSpec], parts: Pieces) -> bool:
    """Returns true if every piece exists with the right shape, and all have one dtype."""
    if any(piece not in specs for piece in parts):
        return False
    shapes = all(specs[piece].shape == box.shape[-2:] for piece, box in parts.items())
    return shapes and len({specs[piece].dtype for piece in parts}) == 1


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
         "TIB": 1 << 40}  # fmt: skip
NO_TEXTS: Mapping[str, str] = {}
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
    texts: Mapping[str, str] = NO_TEXTS,
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
        strict: Raise if a name matches no row of ``names``. If false, ``Report`` lists these tensors, which
            are left out.
        overwrite: Replace a folder that contains only a model.
        beside: Files to copy into the folder (config, tokenizer).
        texts: The texts of further files to write, by file name.
        trust: The key with which ``src`` must have been written.
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
        buffers = chunks(reader, name, adapters, read_from, part)
        return cast_chunks(name, buffers, specs_of[piece].dtype, new_dtypes[piece])

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

    read, unmatched = reader.bytes_read, table.unmatched
    return Report(folder, len(files), bytes_read=read, bytes_written=written, peak=PEAK, left=unmatched)


def _pieces(
    name: str, theirs: str, parts: Mapping[str, Pieces]
) -> Iterator[tuple[str, tuple[str, Box | None]]]:
    """Yields the tensors of the folder that our tensor ``name`` is written to.

    An item is a name in the folder, our name, and the box to write, which is ``None`` for the full tensor.
    """
    if theirs not in parts:
        yield theirs, (name, None)
    for piece, box in parts.get(theirs, {}).items():
        yield piece, (name, box if len(box.lo) == 3 else None)  # a matrix is written in full


def _spec(spec: TensorSpec, part: Box | None) -> TensorSpec:
    """Returns the spec of the tensor that is written; a part is one expert's matrix."""
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
        "folder with only a model",
    )


def check_beside(beside: Sequence[Path]) -> None:
    """Raises ``ValueError`` for a file that does not exist, or whose name another file will have."""
    seen = set()
    for path in beside:
        if not path.is_file():
            raise ValueError(f"{path}: cannot be copied into the model's folder: no such file")
        if path.name in seen or _model_file(path):
            raise ValueError(f"{path}: cannot be copied into the model's folder: it has another {path.name}")
        seen.add(path.name)


def to_theirs(src: object, ours: Iterable[str], names: Table | None, *, strict: bool = True) -> Renamed:
    """Returns the folder's names of our tensors in ``src``, by the table ``names``.

    Raises as ``renamed`` does, and ``ValueError`` if the table leaves out all tensors.
    """
    new = renamed(ours, names, strict=strict)
    if not new.names:
        raise ValueError(f"names: no tensor of {src} is left to write; the table leaves all of them out")
    return new


def shards(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """Distributes tensors over shards, in order.

    A new shard starts if the next tensor would exceed ``limit`` bytes. There is at least one shard, which may
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
        return {SINGLE_FILE: parts[0]}
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
    nbytes = 0
    if match is not None:
        nbytes = int(float(match[1]) * UNITS[match[2].upper()])
    elif not isinstance(size, bool):
        with suppress(ValueError):
            nbytes = int(size)
    if nbytes < 1:
        raise ValueError(f"max_shard_size: {size!r} is not a size; give bytes, or text such as 2GiB")
    return nbytes


def _model_file(path: Path) -> bool:
    return path.name == INDEX or _MODEL.fullmatch(path.name) is not None
