"""Loggers in a user's own code: one that keeps what it gets, and some that fail."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOREVER_S = 1e6


class Keeps:
    def __init__(self, path: str, **_: Any) -> None:
        self.path = path

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        self._write(start={"config": config, "plan": plan, "folder": str(folder)})

    def log(self, row: dict[str, Any]) -> None:
        self._write(row=row)

    def close(self) -> None:
        self._write(close=True)

    def _write(self, **line: Any) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Bare:
    """Has only the one method that a logger needs."""

    def __init__(self, path: str) -> None:
        self.path = path

    def log(self, row: dict[str, Any]) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            print(row["step"], file=file)


class Fails(Keeps):
    """``where``: the method that raises; ``log`` raises only at ``step``."""

    def __init__(self, path: str, where: str, step: int = 0) -> None:
        super().__init__(path)
        self.where, self.step = where, step
        if where == "__init__":
            raise KeyError("no such thing")

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        if self.where == "on_start":
            raise KeyError("no such thing")

    def log(self, row: dict[str, Any]) -> None:
        if self.where == "log" and row["step"] == self.step:
            raise KeyError("no such thing")
        super().log(row)

    def close(self) -> None:
        if self.where == "close":
            raise KeyError("no such thing")


class Hangs:
    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        self._at("on_start")

    def log(self, row: dict[str, Any]) -> None:
        self._at("log")

    def close(self) -> None:
        self._at("close")

    def _at(self, where: str) -> None:
        if where == self.where:
            time.sleep(FOREVER_S)


class Dies:
    def log(self, row: dict[str, Any]) -> None:
        os._exit(3)


class Silent:
    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None: ...


class Unfit:
    def on_start(self, config: dict[str, Any]) -> None: ...

    def log(self, row: dict[str, Any], extra: int) -> None: ...

    def close(self, *, how: str) -> None: ...
