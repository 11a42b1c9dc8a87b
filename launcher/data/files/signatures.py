"""What a file is, by its first bytes or its name: kinds of files that are no plain text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNPACK = "unpack it first"
EXTRACT = "write the text of its records to a text file first; data=tokens reads tokens that were prepared"
OTHER = "data=tokens reads tokens that were prepared, as .tokens or .bin"
TOKENS = "data=tokens data.path={} reads it"


@dataclass(frozen=True)
class Kind:
    """``what`` it is, and what to do with it: ``way``, in which ``{}`` is its path."""

    what: str
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
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".pkl": "pickle",
    ".pt": "PyTorch",
    ".safetensors": "safetensors",
}
PREPARED = (".tokens", ".bin", ".idx")

_BY_NAME = {
    **{suffix: Kind(name, UNPACK) for suffix, name in PACKED.items()},
    **{suffix: Kind(name, EXTRACT) for suffix, name in RECORDS.items()},
    **{suffix: Kind(name, OTHER) for suffix, name in NUMBERS.items()},
    **{suffix: Kind("tokens", TOKENS) for suffix in PREPARED},
}
_BY_START = {
    b"\x1f\x8b": Kind("gzip", UNPACK),
    b"BZh": Kind("bzip2", UNPACK),
    b"\x28\xb5\x2f\xfd": Kind("Zstandard", UNPACK),
    b"\xfd7zXZ\x00": Kind("xz", UNPACK),
    b"PK\x03\x04": Kind("zip", UNPACK),
    b"PAR1": Kind("Parquet", EXTRACT),
    b"ARROW1": Kind("Arrow", EXTRACT),
    b"\x93NUMPY": Kind("NumPy", OTHER),
    b"\x89TOKENS\n": Kind("tokens", TOKENS),
    b"MMIDIDX\x00\x00": Kind("tokens", TOKENS),
}


def by_name(path: Path) -> Kind | None:
    """By the end of the name; ``None`` where that says nothing against plain text.

    >>> by_name(Path("a/web.JSONL")).what
    'JSON lines'
    """
    return _BY_NAME.get(path.suffix.lower())


def by_start(data: bytes, least: int = 2) -> Kind | None:
    """By the first bytes, where these are ``least`` or more that say so.

    >>> by_start(bytes.fromhex("1f8b0800")).what
    'gzip'
    """
    return next(
        (kind for start, kind in _BY_START.items() if len(start) >= least and data.startswith(start)), None
    )
