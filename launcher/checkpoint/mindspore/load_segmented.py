"""Loads the tensors of one network from the several files of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.checkpoint.mindspore.formats.encryption import MODES, CipherMode, check_key
from launcher.checkpoint.mindspore.load_module import load_into, parameter
from launcher.checkpoint.mindspore.rank_source import SUFFIXES, RankSource, open_source

Prefixes = str | list[str] | tuple[str, ...] | None


def load_segmented_checkpoints(
    ckpt_file_dir: str,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefixes = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: Prefixes = None,
    choice_func: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Returns the tensors of every ``*.safetensors``, or every ``*.ckpt``, in a folder, by name.

    Tensors are ``torch.nn.Parameter``; strings that were saved among them are ``str``.

    Args:
        ckpt_file_dir: The folder.
        net: A ``torch.nn.Module`` to load the tensors into. It takes each tensor whose name is that of one of
            its own or ends in it, cast to its own width.
        strict_load: Names and dtypes of ``net`` must be those in the files; the files may also have counters
            and optimizer states.
        filter_prefix: Leave out names that start with one of these.
        dec_key: The key of ``.ckpt`` files that are encrypted in ``dec_mode``.
        dec_mode: The mode of their encryption.
        specify_prefix: Leave out names that start with none of these.
        choice_func: Leave out names for which it returns False. It is called only if no prefix is given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The folder is missing or empty, has files of two formats or files that cannot be read, has
            two tensors of one name, no tensor is left, or the tensors do not fit ``net``.
    """
    if not isinstance(ckpt_file_dir, str):
        raise TypeError(f"ckpt_file_dir: expected str, got {type(ckpt_file_dir).__name__}")
    if net is not None and not (hasattr(net, "state_dict") and hasattr(net, "load_state_dict")):
        raise TypeError(f"net: expected a torch.nn.Module, got {type(net).__name__}")
    mode = _mode(dec_key, dec_mode)
    drop = _prefixes("filter_prefix", filter_prefix)
    keep = _prefixes("specify_prefix", specify_prefix)

    # index every file; two files may have a tensor of one name only if it is the same tensor
    where: dict[str, RankSource] = {}
    texts: dict[str, str] = {}
    for source in (open_source(path, dec_key, mode) for path in _files(Path(ckpt_file_dir), dec_key)):
        for name in source.specs:
            if not _same(where.setdefault(name, source), source, name):
                told = f"{name} is in {where[name].path.name} too; one file of each tensor can count"
                raise ValueError(f"{source.path}: {told}")
        for name, text in source.texts.items():
            if texts.setdefault(name, text) != text:
                raise ValueError(f"{source.path}: the string {name} differs from that of another file")

    # the requested names; choice_func is called only if no prefix is given
    def wanted(name: str) -> bool:
        if choice_func is not None and not drop and not keep:
            return _choice(choice_func, name)
        return not name.startswith(drop) and (not keep or name.startswith(keep))

    chosen = {name: source for name, source in where.items() if wanted(name)}
    texts = {name: text for name, text in texts.items() if wanted(name)}
    if not chosen:
        filters = "filter_prefix, specify_prefix and choice_func"
        raise ValueError(f"{ckpt_file_dir}: no tensor of {len(where)} is left by {filters}")

    found = {name: parameter(source.specs[name], source.chunks(name)) for name, source in chosen.items()}
    if net is not None:
        load_into(net, found, strict=strict_load)
    return found | texts


def _same(first: RankSource, other: RankSource, name: str) -> bool:
    """Whether two files have the same tensor ``name``: segments repeat shared ones, such as step counters."""
    if first is other:
        return True
    return first.specs[name] == other.specs[name] and b"".join(first.chunks(name)) == b"".join(
        other.chunks(name)
    )


def _files(folder: Path, key: bytes | None) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"ckpt_file_dir: {folder} is not a folder")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"ckpt_file_dir: {folder} has no .safetensors or .ckpt file")
    if other := [path for path in files if path.suffix != files[0].suffix]:
        raise ValueError(f"{files[0]} and {other[0].name}: two formats in one folder; leave files of one")
    if key is not None and files[0].suffix != ".ckpt":
        raise ValueError(f"dec_key: {files[0]} is no .ckpt file; leave out dec_key")
    return files


def _mode(key: bytes | None, mode: str) -> CipherMode:
    if mode not in MODES:
        raise ValueError(f"dec_mode: {mode!r} is not known; give {', '.join(MODES)}")
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"dec_key: expected bytes, got {type(key).__name__}")
    if key is not None:
        check_key(key, mode)
    return mode


def _prefixes(key: str, value: Prefixes) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else (value or ())
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
