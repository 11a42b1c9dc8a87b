"""Recognizes kinds of data files by name and first bytes, and says how to use each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.job.schema.did_you_mean import nearest

UNPACK = "unpack it first"
PREPARE = "steps=[prepare] steps.prepare.src={} converts it to tokens, which data=tokens reads"
RENAME = "give it the suffix of its format, and steps=[prepare] tokenizes it"
OTHER = "data=tokens reads prepared tokens, as .tokens or .bin"
TOKENS = "data=tokens data.path={} reads it"


@dataclass(frozen=True)
class FileKind:
    """The kind of a file, and the ``way`` to use it, in which ``{}`` stands for its path."""

    kind: str
    way: str


PACKED = {
    ".gz": "gzip", ".tgz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2", ".xz": "xz", ".zip": "zip",
    ".tar": "tar", ".lz4": "LZ4",
}  # fmt: skip
RECORDS = {
    ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON", ".parquet": "Parquet",
    ".arrow": "Arrow", ".feather": "Arrow",
}  # fmt: skip
NUMBERS = {
    ".npy": "NumPy", ".npz": "NumPy", ".pkl": "pickle", ".pt": "PyTorch", ".safetensors": "safetensors",
}  # fmt: skip
PREPARED = (".tokens", ".bin", ".idx")

_BY_NAME = {
    **{suffix: FileKind(name, UNPACK) for suffix, name in PACKED.items()},
    **{suffix: FileKind(PACKED[suffix], PREPARE) for suffix in (".gz", ".zst")},
    **{suffix: FileKind(name, PREPARE) for suffix, name in RECORDS.items()},
    **{suffix: FileKind(name, OTHER) for suffix, name in NUMBERS.items()},
    **{suffix: FileKind("tokens", TOKENS) for suffix in PREPARED},
}
_BY_START = {
    b"\x1f\x8b": FileKind("gzip", RENAME),
    **{b"BZh%d1AY&SY" % level: FileKind("bzip2", UNPACK) for level in range(1, 10)},
    b"\x28\xb5\x2f\xfd": FileKind("Zstandard", RENAME),
    b"\xfd7zXZ\x00": FileKind("xz", UNPACK),
    b"PK\x03\x04": FileKind("zip", UNPACK),
    b"PAR1": FileKind("Parquet", RENAME),
    b"ARROW1": FileKind("Arrow", RENAME),
    b"\x93NUMPY": FileKind("NumPy", OTHER),
    b"\x89TOKENS\n": FileKind("tokens", TOKENS),
    b"MMIDIDX\x00\x00": FileKind("tokens", TOKENS),
}


def kind_by_suffix(path: Path) -> FileKind | None:
    """Returns the kind that the suffix means; ``None`` if the file may be plain text.

    >>> kind_by_suffix(Path("a/web.JSONL")).kind
    'JSON lines'
    """
    return _BY_NAME.get(path.suffix.lower())


def kind_by_start(data: bytes, least: int = 2) -> FileKind | None:
    """Returns the kind whose signature starts ``data``; shorter signatures than ``least`` bytes do not count.

    >>> kind_by_start(bytes.fromhex("1f8b0800")).kind
    'gzip'
    """
    return next(
        (kind for start, kind in _BY_START.items() if len(start) >= least and data.startswith(start)), None
    )


def file(path: str) -> str | None:
    """Returns the file next to ``path`` with the most similar name; ``None`` if no name is similar."""
    here = Path(path)
    try:
        names = sorted(p.name for p in here.parent.iterdir() if p.is_file())
    except OSError:
        return None
    similar = nearest(here.name, names, 0.8)
    return str(here.with_name(similar)) if similar and similar != here.name else None


class BadFile(ValueError):
    """Raised for a file that cannot be used. The text is the reason; most callers put its path before it."""
