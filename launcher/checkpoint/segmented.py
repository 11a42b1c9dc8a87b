"""One network's tensors, found in the several files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.files import blob_at, mapped
from launcher.checkpoint.header import Header, read_header

OPEN = 64  # files mapped at once
Prefixes = str | list[str] | tuple[str, ...] | None


class Segments(Mapping[str, Blob]):
    """Tensors by name; bytes are read when they are looked at."""

    def __init__(self, headers: Mapping[Path, Header], where: Mapping[str, Path]) -> None:
        self._headers, self._where = headers, where
        self._map = lru_cache(maxsize=OPEN)(mapped)

    def __getitem__(self, name: str) -> Blob:
        path = self._where[name]
        return blob_at(self._map(path), self._headers[path], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def load_segmented_checkpoints(
    ckpt_file_dir: str,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
) -> Mapping[str, Blob]:
    """The tensors of every ``*.safetensors`` in the folder, by name.

    Left out are names that start with one of ``filter_prefix``, with none of ``specify_prefix``, or that
    ``choice_func`` says False to. ``net``, ``strict_load`` and the decryption are not available: this package has no
    networks. Raises ``TypeError`` for arguments of other types, ``ValueError`` for a folder that is missing, empty,
    of files that cannot be read, or with a name in two of them.
    """
    if not isinstance(ckpt_file_dir, str):
        raise TypeError(f"ckpt_file_dir: expected str, got {type(ckpt_file_dir).__name__}")
    _check_available(net, strict_load, dec_key)
    drop, keep = _prefixes("filter_prefix", filter_prefix), _prefixes("specify_prefix", specify_prefix)
    headers = {path: read_header(path) for path in _files(Path(ckpt_file_dir))}
    where: dict[str, Path] = {}
    for path, header in headers.items():
        for name in header.entries:
            if name in where:
                raise ValueError(f"{path}: {name} is in {where[name].name} too; one file of each tensor can count")
            where[name] = path
    chosen = {n: p for n, p in where.items() if not n.startswith(drop) and (keep == () or n.startswith(keep))}
    if choice_func is not None:
        chosen = {n: p for n, p in chosen.items() if _choice(choice_func, n)}
    if not chosen:
        raise ValueError(
            f"{ckpt_file_dir}: no tensor of {len(where)} is left by filter_prefix, specify_prefix and choice_func"
        )
    return Segments(headers, chosen)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"ckpt_file_dir: {folder} is not a folder")
    files = sorted(folder.glob("*.safetensors"))
    if foreign := sorted(folder.glob("*.ckpt")):
        mixed = "two formats in one folder" if files else ".ckpt files are not available yet"
        raise ValueError(f"{foreign[0]}: {mixed}; give a folder of .safetensors files")
    if not files:
        raise ValueError(f"ckpt_file_dir: {folder} has no .safetensors file")
    return files


def _check_available(net: Any, strict_load: bool, dec_key: bytes | None) -> None:
    if net is not None or strict_load:
        raise ValueError(
            "net, strict_load: not available: this package has no networks; load the mapping that is returned"
        )
    if dec_key is not None:
        raise ValueError("dec_key: encrypted files are not available yet")


def _prefixes(key: str, value: Prefixes) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value or ()
    if not isinstance(given, list | tuple) or not all(isinstance(prefix, str) for prefix in given):
        raise TypeError(f"{key}: expected str, or a list or tuple of str, got {value!r}")
    if "" in given:
        raise ValueError(f"{key}: an empty prefix is that of every name")
    return tuple(given)


def _choice(choice: Callable[[str], bool], name: str) -> bool:
    answer = choice(name)
    if not isinstance(answer, bool):
        raise TypeError(f"choice_func: it said {answer!r} to {name}; True or False is expected")
    return answer
