"""Determines the format and compression of corpus files by name, and checks their first bytes."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from launcher.data.file_kinds import BadFile, kind_by_start
from launcher.data.tokens.corpus import files_of
from launcher.job.schema.data import Paths
from launcher.optional import install_command
from launcher.untrusted.files import opened, read_json

Form = Literal["text", "jsonl", "parquet", "arrow"]
FORMS: dict[str, Form] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
PACKINGS = {".gz": "gzip", ".zst": "Zstandard"}
LINES = ("text", "jsonl")
TEXT_HEAD = 64 << 10  # bytes at the start of a file; a NUL among them means that it is not plain text
SUFFIXES = (*FORMS, *(f + p for f, form in FORMS.items() if form in LINES for p in PACKINGS))
READ = (
    ".txt, .text, .jsonl, .ndjson, .json (one object per line), each also with .gz or .zst, .parquet, .arrow"
)
HEAD = 64  # bytes; a signature is shorter
STATE = "state.json"  # lists the files of a folder of datasets.save_to_disk; other JSON files are metadata


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus. ``packing`` is the suffix of its compression, or ``""``; ``size`` is in bytes."""

    path: Path
    form: Form
    packing: str
    size: int


def named(paths: Paths, form: str) -> list[Path]:
    """Returns the files that ``paths`` name; of a folder, if ``form`` is auto, only those of known suffixes.

    Raises ``BadFile``, naming the path, and ``OSError``.
    """
    each = [paths] if isinstance(paths, str) else paths
    listed = [file for path in each for file in _of_datasets(path) or [path]]
    suffixes = SUFFIXES if form == "auto" else ("",)
    return files_of(tuple(listed), suffixes)


def corpus_file(path: Path, form: str) -> CorpusFile:
    """Determines a file's form by its name and first bytes. Raises ``BadFile`` and ``OSError``."""
    packing = path.suffix.lower() if path.suffix.lower() in PACKINGS else ""
    suffix = Path(path.name.removesuffix(path.suffix)).suffix.lower() if packing else path.suffix.lower()
    file_form = FORMS.get(suffix) if form == "auto" else cast(Form, form)
    if file_form is None:
        raise BadFile(f"unknown format by its name: {READ} are read; set format=text or format=jsonl")
    if packing and file_form not in LINES:
        raise BadFile(f"{file_form} compressed as {packing}: unpack it first")

    with opened(path) as stream:
        head = stream.read(HEAD)
        size = stream.seek(0, io.SEEK_END)
    _check_start(head, file_form, packing)
    _check_installed(file_form, packing)
    return CorpusFile(path, file_form, packing, size)


@contextmanager
def unpacked(file: CorpusFile) -> Iterator[BinaryIO]:
    """Opens a file as uncompressed bytes. Reading a damaged file raises one of ``packing_errors``."""
    with opened(file.path) as stream:
        if file.packing == ".gz":
            with gzip.GzipFile(fileobj=stream) as plain:
                yield cast(BinaryIO, plain)
        elif file.packing == ".zst":
            with io.BufferedReader(_ZstandardFrames(stream)) as plain:
                yield cast(BinaryIO, plain)
        else:
            yield stream


class _ZstandardFrames(io.RawIOBase):
    """Reads the uncompressed bytes of a file's frames. Raises ``EOFError`` if the last frame is truncated.

    ``zstandard``'s own ``stream_reader`` would end without an error, as if the file were complete.
    """

    _READ = 1 << 10  # compressed bytes read at once: four of them may become 128 KB

    def __init__(self, stream: BinaryIO) -> None:
        import zstandard

        super().__init__()
        self._stream = stream
        self._frames = zstandard.ZstdDecompressor()
        self._frame: Any = None  # None between two frames
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            packed = self._packed or self._stream.read(self._READ)
            if not packed and self._frame is not None:
                raise EOFError("the file ends inside a Zstandard frame: it is cut short")
            if not packed:
                return 0

            if self._frame is None:
                self._frame = self._frames.decompressobj()
            self._plain, self._packed = self._frame.decompress(packed), b""
            if self._frame.eof:
                self._frame, self._packed = None, self._frame.unused_data

        size = min(len(buffer), len(self._plain))
        buffer[:size], self._plain = self._plain[:size], self._plain[size:]
        return size


def not_text(head: bytes) -> str | None:
    """Returns why a file that starts with ``head`` is not plain text; ``None`` if it is.

    A UTF-16 text of ASCII characters is valid UTF-8, in which each character has a NUL next to it.
    """
    at = head[:TEXT_HEAD].find(0)
    if at < 0:
        return None
    return f"byte {at} is NUL, so it is not plain text: write the text to a UTF-8 file first"


def packing_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that reading a damaged compressed file raises."""
    import zlib

    if find_spec("zstandard") is None:
        return (EOFError, zlib.error, gzip.BadGzipFile)
    import zstandard

    return (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


def _of_datasets(path: str) -> list[str]:
    """Returns the files of a folder that ``datasets`` wrote, in its order; empty for any other folder."""
    folder = Path(path)
    if not (folder / STATE).is_file():
        return []
    try:
        content = read_json(folder / STATE)
    except ValueError:
        return []
    rows = content.get("_data_files") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "filename" in row for row in rows):
        return []
    return [str(folder / Path(str(row["filename"])).name) for row in rows]


def _check_start(head: bytes, form: Form, packing: str) -> None:
    """Raises ``BadFile`` if the first bytes show another kind of file than the name."""
    kind = kind_by_start(head)
    expected = PACKINGS.get(packing) or {"parquet": "Parquet", "arrow": "Arrow"}.get(form)
    if form == "arrow" and kind is None:
        return  # a stream of record batches has no signature
    if head and (kind.kind if kind else None) != expected:
        actual = f"{kind.kind} by its first bytes" if kind else "its first bytes are not of this format"
        raise BadFile(f"{expected or form} by its name, but {actual}")


def _check_installed(form: Form, packing: str) -> None:
    need = "pyarrow" if form in ("parquet", "arrow") else "zstandard" if packing == ".zst" else None
    if need is not None and find_spec(need) is None:
        raise BadFile(f"the package {need}, which reads it, is not installed: {install_command('data')}")
