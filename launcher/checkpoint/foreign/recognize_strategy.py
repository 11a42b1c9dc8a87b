"""Opens strategy files of launcher and of MindSpore, which it recognizes by their content."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.layout.strategy_file import load
from launcher.optional import mindspore
from launcher.untrusted.files import parsed, read_bytes


def open_strategy(key: str, value: str | os.PathLike[str] | None) -> Strategy | mindspore.StrategyFile | None:
    """Opens a strategy file of launcher or MindSpore; returns ``None`` for ``None``.

    Raises ``TypeError`` or ``ValueError`` that names the file or ``key``, the name of the argument.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{key}: expected a path or None, got {type(value).__name__}")
    path = Path(value)
    if not path.exists():
        raise ValueError(f"{key}: {path}: no such file")
    return load(path) if is_ours(path) else mindspore.read_strategy(path)


def is_ours(path: Path) -> bool:
    """Returns true if ``path`` is a strategy file of launcher, or a folder of them.

    MindSpore has no such folders.
    """
    if path.is_dir():
        return True
    try:
        data = parsed(read_bytes(path))
    except ValueError:
        return False
    return isinstance(data, dict) and "format" in data
