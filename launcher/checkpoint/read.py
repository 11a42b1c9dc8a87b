"""Reads the shards of any layout from a checkpoint that was saved in another layout."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.checkpoint.box_bytes import box_index, stream_box
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.shards import overlapping_shards
from launcher.checkpoint.layout.strategy import KINDS, Kind, Strategy, match
from launcher.checkpoint.manifest import (
    EXTRA,
    FILE_OF,
    MANIFEST,
    Manifest,
    check_files,
    opened,
    parse_manifest,
    rank_file,
    record_of,
    stamp,
    text_record,
)
from launcher.checkpoint.store import STATE, complete, latest, step_folder, step_of
from launcher.checkpoint.tensorfile.disk import parsed, read_bytes
from launcher.checkpoint.tensorfile.encryption import salt_of
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import (
    Blob,
    ByteRange,
    FileRecord,
    Header,
    described,
    read_header,
    words,
)
from launcher.checkpoint.write import rank_files, saved_boxes
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder; its tensors stay on disk.

    ``key`` decrypts the tensors if they are encrypted; ``place`` is the place that it was loaded from.
    """

    folder: Path
    manifest: Manifest
    strategy: Strategy
    state: Mapping[str, Any]
    key: bytes | None = field(default=None, repr=False)
    place: str | None = None


def open_checkpoint(folder: Path, trust: Trust = ANYONE) -> Checkpoint:
    """Opens a checkpoint folder and checks everything but its tensor files.

    If the checkpoint is encrypted, nothing in it is used before the manifest's MAC has been verified.
    ``trust`` says which key the MAC must be made with. Names, shapes, digests and the state are not secret:
    they can be read without the key, but not changed.

    Raises ``ValueError`` if the folder is incomplete, its files do not belong together, or the key is wrong.
    """
    manifest = parse_manifest(folder)
    secret = opened(folder, manifest, trust)

    # the files must exist and belong together
    check_files(folder, manifest)
    strategy = _strategy(folder, manifest)
    _check_listed(folder, manifest, strategy)
    state = _state(folder / STATE, manifest.files[STATE])
    if secret is None:
        return Checkpoint(folder, manifest, strategy, state)

    # an older checkpoint that was renamed to this step is still authentic, but its state has the older step
    named = step_of(folder)
    saved = state.get("step")
    if named is not None and named != saved:
        mismatch = f"its name says step {named}, but it is the checkpoint of step {saved}"
        raise ValueError(f"{folder}: {mismatch}: rename it")
    return Checkpoint(folder, manifest, strategy, state, key=secret.key, place=secret.place)


def best_checkpoint(checkpoints: Path, trust: Trust = ANYONE) -> Path:
    """Returns the checkpoint that ``checkpoint.best`` has kept.

    Its step is recorded in the state of the newest checkpoint. Raises ``ValueError`` if no best step is
    recorded, or its checkpoint no longer exists.
    """
    newest = latest(checkpoints, trust)
    results = {} if newest is None else open_checkpoint(newest, trust).state.get("results")
    step = results.get("best_step") if isinstance(results, dict) else None
    if not isinstance(step, int | float):
        cure = "train with checkpoint.best=val_loss to keep one"
        raise ValueError(f"{checkpoints}: no checkpoint is recorded as the best; {cure}")
    best = step_folder(checkpoints, int(step))
    if not complete(best):
        raise ValueError(f"{best}: it was the best checkpoint, but no longer exists")
    return best


def _strategy(folder: Path, manifest: Manifest) -> Strategy:
    records = {name: record for name, record in manifest.files.items() if name.startswith("strategy/")}
    present = {f"strategy/{path.name}" for path in (folder / "strategy").glob("*.json")}
    same = (text_record(folder / name) == record for name, record in records.items())
    if present == records.keys() and all(same):
        strategy = strategy_file.load(folder / "strategy")
        if strategy.digest == manifest.strategy and strategy.grid.size == manifest.world:
            return strategy
    raise ValueError(f"{folder}: its strategy files are not those that the manifest describes")


def _check_listed(folder: Path, manifest: Manifest, strategy: Strategy) -> None:
    """Raises ``ValueError`` unless the manifest lists exactly the files of a checkpoint of this ``strategy``.

    Random states exist for every rank or for none: a checkpoint that was transformed or imported has none.
    """
    files = manifest.files
    of_a_rank = rank_files(strategy)
    if any(name.endswith(f"/{EXTRA}") for name in files):
        of_a_rank += (EXTRA,)

    # every expected file; lazily, because an untrusted manifest may claim any number of ranks
    expected = chain(
        (STATE,),
        (f"strategy/{strategy_file.stage_file(stage)}" for stage in range(strategy.stages)),
        (rank_file(rank, file) for rank in range(manifest.world) for file in of_a_rank),
    )
    absent = next((name for name in expected if name not in files), None)
    if absent is not None:
        raise ValueError(f"{folder / MANIFEST}: it does not list {absent}, which this checkpoint should have")

    # and no other file
    if len(files) > 1 + strategy.stages + manifest.world * len(of_a_rank):
        odd = next(name for name in files if not _belongs(name, of_a_rank, manifest.world))
        raise ValueError(f"{folder / MANIFEST}: it lists {odd}, which is not a file of this checkpoint")


def _belongs(name: str, of_a_rank: tuple[str, ...], world: int) -> bool:
    """Returns true if a checkpoint of ``world`` ranks, each with files ``of_a_rank``, may list ``name``."""
    if name == STATE or name.startswith("strategy/"):
        return True
    match = re.fullmatch(r"rank_(\d+)/(.*)", name)
    return match is not None and match[2] in of_a_rank and int(match[1]) < world


def _state(path: Path, record: FileRecord) -> Mapping[str, Any]:
    data = read_bytes(path)
    if record_of(data) != record:
        raise ValueError(f"{path}: damaged: its digest is not the one in the manifest")
    state = parsed(path, data)
    if not isinstance(state, dict):
        raise ValueError(f"{path}: not a JSON object")
    return state


def read_box(checkpoint: Checkpoint, name: str, box: Box, *, verify: bool = True) -> Blob:
    """Returns a copy of the elements of ``box`` (global indices) of a tensor; ``name`` may be an alias."""
    return Reader(checkpoint, verify=verify).box(name, box)


def read_rank(
    checkpoint: Checkpoint, dst: Strategy, rank: int, *, kinds: tuple[Kind, ...] = KINDS, verify: bool = True
) -> dict[str, Blob]:
    """Returns every piece that ``rank`` of ``dst`` holds, replicas and empty pieces included.

    To have only one tensor in memory at a time, use ``each``.
    """
    return dict(each(checkpoint, dst, rank, kinds=kinds, verify=verify))


def each(
    checkpoint: Checkpoint,
    dst: Strategy,
    rank: int,
    *,
    kinds: tuple[Kind, ...] = KINDS,
    verify: bool = True,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Blob]]:
    """Yields the name and the piece of each tensor that ``rank`` of ``dst`` holds, each in its own memory.

    Tensors of other ``kinds`` need not match. ``only`` limits the names to read. Raises ``ValueError``.
    """
    if not 0 <= rank < dst.grid.size:
        raise ValueError(f"rank {rank} is not in the strategy of {dst.grid.size} ranks")
    names = match(checkpoint.strategy.only(*kinds), dst.only(*kinds))
    reader = Reader(checkpoint, verify=verify)
    for name, entry in dst.only(*kinds).entries_of(rank).items():
        if only is not None and name not in only:
            continue
        box = entry.layout.box(rank)
        assert box is not None
        yield name, reader.box(names[name], box)


def read_extra(checkpoint: Checkpoint, rank: int) -> dict[str, Blob]:
    """Returns the tensors that ``rank`` saved outside the layouts, by name; empty if no rank saved any."""
    file = rank_file(rank, EXTRA)
    if file not in checkpoint.manifest.files:
        return {}

    header = file_header(checkpoint, rank, EXTRA)
    window = Window(checkpoint.key)
    blobs = {}
    for name, slot in header.entries.items():
        data = bytearray().join(window.chunks(checkpoint.folder / file, slot))
        check_digest(checkpoint, file, name, xxhash.xxh3_128_hexdigest(data))
        blobs[name] = Blob.of(slot.spec.dtype, slot.spec.shape, data)
    return blobs


@dataclass(frozen=True)
class _SavedTensor:
    """The piece of tensor ``name`` that one rank saved: the bytes of ``slot`` in ``file``.

    ``file`` is a path within the checkpoint folder.
    """

    file: str
    name: str
    slot: ByteRange = field(compare=False)


class Reader:
    """Reads boxes, and verifies each saved piece the first time that some of it is read."""

    def __init__(self, checkpoint: Checkpoint, *, verify: bool = True) -> None:
        self.checkpoint = checkpoint
        self.bytes_read = 0
        self._verify = verify
        self._verified: set[_SavedTensor] = set()
        self._window = Window(checkpoint.key)
        self._helper: Executor | None = None
        self._helpers_window = Window(checkpoint.key)
        self._under_way: dict[_SavedTensor, Future[None]] = {}
        self._header = lru_cache(maxsize=None)(partial(file_header, checkpoint))

    def beside(self, helper: Executor | None = None) -> Reader:
        """Returns another reader, for concurrent use. A piece that one of them has verified counts for both.

        ``helper``, an executor with one thread, verifies pieces while they are read: damage is raised only
        after the last chunk.
        """
        new = Reader(self.checkpoint, verify=self._verify)
        new._verified = self._verified
        new._header = self._header
        new._helper = helper
        return new

    def check_headers(self) -> None:
        """Checks the header of every file, before any tensor is read. Raises ``ValueError``."""
        files = rank_files(self.checkpoint.strategy)
        for rank in range(self.checkpoint.manifest.world):
            for file in files:
                self._header(rank, file)

    def box(self, name: str, box: Box) -> Blob:
        strategy = self.checkpoint.strategy
        if name not in strategy.named:
            raise ValueError(f"{self.checkpoint.folder}: it has no tensor {name}")
        first = strategy.named[name]
        spec = TensorSpec(box.shape, strategy.entries[first].dtype)
        data = np.empty(spec.nbytes, np.uint8)
        self._fill(first, box, words(data, spec))
        self._settle()
        return Blob.of(spec.dtype, spec.shape, data)

    def chunks(self, name: str, box: Box) -> Iterator[memoryview]:
        """Yields the bytes of a box, in order. All chunks share one buffer: use each before the next."""
        dtype = self.checkpoint.strategy.entries[name].dtype
        yield from stream_box(box, dtype, lambda part, out: self._fill(name, part, out))
        self._settle()

    def _fill(self, name: str, box: Box, out: npt.NDArray[Any]) -> None:
        """Copies the elements of ``box`` into ``out`` from the pieces that the ranks saved."""
        entry = self.checkpoint.strategy.entries[name]
        kind = FILE_OF[entry.kind]
        for shard, both in overlapping_shards(entry.layout, box):
            slot = self._header(shard.rank, kind).entries[name]
            tensor = _SavedTensor(rank_file(shard.rank, kind), name, slot)
            self._verify_once(tensor)
            there = box_index(both.within(shard.box))
            here = box_index(both.within(box))
            self._window.copy(self.checkpoint.folder / tensor.file, slot, there, out[here])
        self.bytes_read += out.nbytes

    def _verify_once(self, tensor: _SavedTensor) -> None:
        if not self._verify or tensor in self._verified or tensor in self._under_way:
            return
        if self._helper is None:
            self._check(tensor, self._window)
        else:
            self._under_way[tensor] = self._helper.submit(self._check, tensor, self._helpers_window)

    def _settle(self) -> None:
        """Waits for the helper's checks; raises ``ValueError`` if a piece is damaged."""
        under_way, self._under_way = self._under_way, {}
        for check in under_way.values():
            check.result()

    def _check(self, tensor: _SavedTensor, window: Window) -> None:
        digest = xxhash.xxh3_128()
        for chunk in window.chunks(self.checkpoint.folder / tensor.file, tensor.slot):
            digest.update(chunk)
        check_digest(self.checkpoint, tensor.file, tensor.name, digest.hexdigest())
        self._verified.add(tensor)


def check_digest(checkpoint: Checkpoint, file: str, name: str, digest: str) -> None:
    """Raises ``ValueError`` unless ``digest`` is the manifest's digest of tensor ``name`` in ``file``."""
    expected = checkpoint.manifest.files[file].tensors[name]
    if digest != expected:
        difference = f"its digest is {digest}, the manifest says {expected}"
        raise ValueError(f"{checkpoint.folder / file}: tensor {name} is damaged: {difference}")


def file_header(checkpoint: Checkpoint, rank: int, file: str) -> Header:
    """Reads the header of one rank's ``file``.

    Raises ``ValueError`` unless the file belongs to this rank and matches the strategy and the manifest.
    """
    manifest = checkpoint.manifest
    path = checkpoint.folder / rank_file(rank, file)
    record = manifest.files.get(rank_file(rank, file))
    if record is None:
        raise ValueError(f"{path}: it is not in the manifest, but the strategy needs it")
    header = read_header(path, checkpoint.key)

    # the file's metadata must name this rank, world and strategy
    mark = stamp(rank, manifest.world, manifest.strategy)
    metadata = header.metadata
    if metadata != mark and metadata.keys() == mark.keys():
        odd = [key for key in mark if metadata[key] != mark[key]]
        differences = "; ".join(
            f"{key.removeprefix('launcher.')} {metadata[key]}, not {mark[key]}" for key in odd
        )
        raise ValueError(f"{path}: a file of another rank or layout: it says {differences}")

    # it must be the file that the manifest describes
    if metadata != mark or header.digest != record.digest or header.entries.keys() != record.tensors.keys():
        raise ValueError(f"{path}: its header is not the one that the manifest describes")
    if checkpoint.key is not None and salt_of(path) != record.salt:
        raise ValueError(f"{path}: a file of another checkpoint: its salt is not the one in the manifest")
    if file != EXTRA:
        boxes = saved_boxes(checkpoint.strategy, rank, files=(file,))
        _check_specs(path, header, checkpoint.strategy, boxes[file])
    return header


def _check_specs(path: Path, header: Header, strategy: Strategy, boxes: Mapping[str, Box]) -> None:
    if boxes.keys() != header.entries.keys():
        odd = sorted(boxes.keys() ^ header.entries.keys())
        raise ValueError(f"{path}: the strategy and the file differ in {', '.join(odd)}")
    for name, box in boxes.items():
        expected = TensorSpec(box.shape, strategy.entries[name].dtype)
        spec = header.entries[name].spec
        if expected != spec:
            difference = f"{described(spec)}, the strategy says {described(expected)}"
            raise ValueError(f"{path}: tensor {name} is {difference}")
