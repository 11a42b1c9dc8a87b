"""Checks that all ranks of an outer launcher see the run folder."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RequestError
from launcher.run.external_ranks.joining import Question
from launcher.runtime.cluster.network import (
    NetworkView,
)
from launcher.runtime.cluster.rendezvous import ranks_text

SHARED_S = 8.0  # seconds until other nodes see a file that one node has written


@dataclass(frozen=True)
class SeesFile(Question):
    """Asks whether a rank sees this file; the answer is "" or the name of a node that does not."""

    token: Path

    @property
    def doing(self) -> str:  # type: ignore[override]
        return f"must look for {self.token}"

    def answer(self, network: NetworkView) -> str:
        end = time.monotonic() + SHARED_S
        while not self.token.is_file():
            if time.monotonic() > end:
                return socket.gethostname()
            with suppress(OSError):
                os.listdir(self.token.parent)  # makes a network file system look again
            time.sleep(0.1)
        return ""


def seen(answers: Mapping[int, str], root: Path, key: str) -> None:
    """Raises ``RequestError`` unless all ranks see what rank 0 has written at ``root``."""
    blind = {rank: node for rank, node in answers.items() if node}
    if blind:
        nodes = ", ".join(dict.fromkeys(blind.values()))
        here = socket.gethostname()
        text = (
            f"{ranks_text(sorted(blind))} (on {nodes}) cannot see what rank 0 (on {here}) has written "
            "there; all ranks need one folder on a shared file system, at the same path"
        )
        raise RequestError((Problem(key, f"{root}: {text}"),))


@contextmanager
def token(root: Path) -> Iterator[Path]:
    """A new, unique file at ``root``; folders that are created for it are removed with it."""
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    file = root / f".shared-{secrets.token_hex(8)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        file.touch()
        yield file
    finally:
        file.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # another process has put something there
                folder.rmdir()
