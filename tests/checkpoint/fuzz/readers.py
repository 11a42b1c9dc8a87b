"""Every reader of files that others may have made: how it gets some bytes, and real bytes to begin with."""

from __future__ import annotations

import base64
import os
import pickle
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.foreign.hugging_face import INDEX, index, read_hf
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.foreign.torch_dcp import read_dcp
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.read import Reader as Boxes
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.tensorfile.encryption import BLOCK, EncryptedFile
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.checkpoint.verify import verify
from launcher.extras.mindspore import strategy_file as group_file
from launcher.extras.mindspore.ckpt import write_ckpt
from launcher.extras.mindspore.encryption import KEYS, MODES, CipherMode
from launcher.extras.mindspore.layouts_without_checkpoint import on_paper
from launcher.extras.mindspore.rank_files import RankSource, open_source
from launcher.extras.mindspore.shapes_of_slices import strategy_with_shapes_of_slices
from launcher.extras.mindspore.strategy_argument import listed
from launcher.plan.values.tensor_spec import TensorSpec
from tests.checkpoint.saving import filled, save, small
from tests.extras.mindspore.truth import FIXTURES

KEY = bytes(range(32))
CORPUS = Path(__file__).parent / "corpus"
FLOATS = {"w": TensorSpec((2, 3), "float32"), "b.é": TensorSpec((0,), "bfloat16"), "s": TensorSpec((), "int64")}


@dataclass(frozen=True)
class Reader:
    """The bytes are written to ``file``, within a folder that ``make`` has prepared.

    ``read`` gets that folder and reads everything. ``seeds`` returns real files, which exist in the prepared folder or
    are made there. If files are encrypted, ``seeds`` returns plain text, ``seal`` encrypts it, and ``block`` bytes are
    read at a time.
    """

    file: str
    read: Callable[[Path], object]
    seeds: Callable[[Path], list[bytes]]
    make: Callable[[Path], object] = lambda folder: None
    seal: Callable[[Path, bytes], bytes] | None = None
    block: int = 0


def outcome(reader: Reader, folder: Path, data: bytes) -> str:
    """The empty string if the reader returns a value; otherwise its ``ValueError``'s message, which names a file."""
    (folder / reader.file).write_bytes(data)
    try:
        reader.read(folder)
        return ""
    except ValueError as caught:
        error = caught
    assert type(error) is ValueError, f"{type(error).__name__}: {error}"
    assert str(folder) in str(error), f"no file is named: {error}"
    return str(error)


def kept(name: str) -> list[bytes]:
    """The corpus of a reader, which is empty for a new reader."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text(encoding="ascii").split() if path.exists() else []
    return [_unpacked(line) for line in lines]


def _unpacked(line: str) -> bytes:
    return zlib.decompress(base64.b85decode(line))


def keep(name: str, corpus: Iterable[bytes]) -> None:
    """Write the corpus, one compressed input per line, the shortest first."""
    CORPUS.mkdir(exist_ok=True)
    lines = [base64.b85encode(zlib.compress(data, 9)).decode() for data in sorted(corpus, key=lambda d: (len(d), d))]
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def looked_at(source: RankSource) -> None:
    """Read every byte of every tensor, and assert that there are as many as its shape says."""
    for name, spec in source.specs.items():
        assert sum(len(memoryview(chunk)) for chunk in source.chunks(name)) == spec.nbytes, name


def _safetensors(folder: Path) -> list[bytes]:
    path = folder / "made.safetensors"
    write_stream(path, FLOATS, lambda n: [memoryview(bytes(FLOATS[n].nbytes))], {"format": "pt"})
    return [path.read_bytes(), (8).to_bytes(8, "little") + b"{}      "]


def _sealed(folder: Path, plain: bytes) -> bytes:
    """The file that our encrypting writer makes of ``plain``."""
    from launcher.checkpoint.tensorfile.encryption import Encryptor

    path = folder / "made.sealed"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        sealer = Encryptor(path, fd, len(plain), KEY)
        sealer.write(0, memoryview(plain))
        sealer.finish()
    finally:
        os.close(fd)
    return path.read_bytes()


def _read_sealed(folder: Path) -> None:
    from launcher.checkpoint.tensorfile.safetensors import read_header

    header = read_header(folder / "f", KEY)
    sealed = EncryptedFile(folder / "f", KEY)
    for slot in header.entries.values():
        assert len(sealed.read(slot.start, slot.stop)) == slot.spec.nbytes


def _ckpts(folder: Path) -> list[bytes]:
    path = folder / "made.ckpt"
    write_ckpt(path, FLOATS, lambda n: [bytes(FLOATS[n].nbytes)])
    real = [FIXTURES / "formats" / name for name in ("dtypes.ckpt", "crc_append.ckpt")]
    return [path.read_bytes(), *(p.read_bytes() for p in real)]


def _crypt(mode: CipherMode) -> Reader:
    key = KEY[: KEYS[mode][-1]]

    def seal(folder: Path, plain: bytes) -> bytes:
        from launcher.extras.mindspore.encryption import CkptEncryptor as Blocks

        path = folder / "made.sealed"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            blocks = Blocks(fd, key, mode)
            blocks.write(plain)
            blocks.close()
        finally:
            os.close(fd)
        return path.read_bytes()

    def read(folder: Path) -> None:
        looked_at(open_source(folder / "f.ckpt", key, mode))

    return Reader("f.ckpt", read, lambda f: _ckpts(f)[:2], seal=seal)


def _checkpoint(folder: Path) -> None:
    save(folder / "step-000001", small(), filled(small()), {"step": 1, "results": {}})


def _whole_checkpoint(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "step-000001")
    Boxes(checkpoint).check_headers()
    verify(folder / "step-000001")


def _hf(folder: Path) -> None:
    for i, (name, spec) in enumerate(FLOATS.items(), 1):
        write_stream(folder / _shard(i), {name: spec}, lambda n: [memoryview(bytes(FLOATS[n].nbytes))], {})


def _shard(i: int) -> str:
    return f"model-{i:05d}-of-{len(FLOATS):05d}.safetensors"


def _indexed(folder: Path) -> list[bytes]:
    return [index({_shard(i): {n: s} for i, (n, s) in enumerate(FLOATS.items(), 1)}).encode()]


def _read_strategy(folder: Path) -> None:
    path = folder / "f"
    found = open_strategy("strategy", path)
    assert found is not None
    try:
        on_paper(found, None)
        strategy_with_shapes_of_slices(found, {name: TensorSpec((4, 4), "int8") for name in listed(found)})
    except ValueError as error:  # of the strategy as a value, which knows no file
        raise ValueError(f"{path}: {error}") from error


def _strategies(folder: Path) -> list[bytes]:
    real = [p for p in sorted((FIXTURES / "real_strategy").iterdir()) if "strategy" in p.name or "merged" in p.name]
    return [*(p.read_bytes() for p in real), strategy_file.text(small(), (0, 1)).encode()]


def _dcp(folder: Path) -> None:
    """Files that torch 2.13 saved for a transposed matrix, a bfloat16 vector and a number."""
    for line in (Path(__file__).parent / "dcp.txt").read_text(encoding="ascii").splitlines():
        name, data = line.split()
        (folder / name).write_bytes(_unpacked(data))


def _read_dcp(folder: Path) -> None:
    found = read_dcp(folder)
    for name, spec in found.specs.items():
        assert sum(chunk.nbytes for chunk in found.chunks(name)) == spec.nbytes, name


def _metadata(folder: Path) -> list[bytes]:
    data = (folder / ".metadata").read_bytes()
    return [data, pickle.dumps({"a": [1, (2.5, None)], "b": {"c"}}, 4)]


READERS = {
    "safetensors": Reader("f.safetensors", lambda f: looked_at(open_source(f / "f.safetensors")), _safetensors),
    "sealed": Reader("f", _read_sealed, _safetensors, seal=_sealed, block=BLOCK),
    "ckpt": Reader("f.ckpt", lambda f: looked_at(open_source(f / "f.ckpt")), _ckpts),
    **{mode.lower(): _crypt(mode) for mode in MODES},
    "index": Reader(INDEX, lambda f: dict(read_hf(f)), _indexed, _hf),
    "manifest": Reader(
        "step-000001/manifest.json",
        _whole_checkpoint,
        lambda f: [(f / "step-000001/manifest.json").read_bytes()],
        _checkpoint,
    ),
    "strategy": Reader("f", _read_strategy, _strategies),
    "groups": Reader(
        "f",
        lambda f: group_file.parse_groups((f / "f").read_bytes(), str(f / "f")),
        lambda f: [p.read_bytes() for p in sorted((FIXTURES / "real_strategy").glob("*group*"))],
    ),
    "dcp_metadata": Reader(".metadata", _read_dcp, _metadata, _dcp),
    "dcp_data": Reader("__0_0.distcp", _read_dcp, lambda f: [(f / "__0_0.distcp").read_bytes()], _dcp),
}
