"""Runs a logger class of the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.job import targets


class OwnLogger:
    """Calls the user's logger; its ``on_start`` and ``close`` are optional."""

    def __init__(self, target: Mapping[str, Any], allow: tuple[str, ...], key: str) -> None:
        self._logger: Any = targets.build(target, allow, object, key=f"{key}._target_")

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        if hasattr(self._logger, "on_start"):
            self._logger.on_start(config, plan, folder)

    def log(self, row: dict[str, Any]) -> None:
        self._logger.log(row)

    def close(self, how: str) -> None:
        if hasattr(self._logger, "close"):
            self._logger.close()
