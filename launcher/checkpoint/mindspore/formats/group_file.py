"""MindSpore's group file, which lists the ranks that hold the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.mindspore.formats.wire import BYTES, MOST, NUMBERS, Message, numbers, packet
from launcher.untrusted.files import read_bytes


@dataclass(frozen=True)
class GroupFile:
    """The content of a file.

    ``groups`` has the ranks of each collective group, by name; ``restore`` has the ranks whose checkpoints
    are equal.
    """

    groups: Mapping[str, tuple[int, ...]]
    restore: tuple[int, ...]


def parse(data: bytes, origin: str) -> GroupFile:
    """Parses a group file. Raises ``ValueError`` naming ``origin`` if ``data`` is not one."""
    try:
        return _parse(data)
    except ValueError as error:
        raise ValueError(f"{origin}: not a MindSpore group file: {error}") from error


def read(path: Path) -> GroupFile:
    return parse(read_bytes(path), str(path))


def text(file: GroupFile) -> bytes:
    items = (
        packet(1, packet(1, name.encode()) + packet(2, numbers(1, r))) for name, r in file.groups.items()
    )
    return b"".join(items) + packet(2, numbers(1, file.restore))


def _parse(data: bytes) -> GroupFile:
    message = Message(data, {1: BYTES, 2: BYTES})
    groups: dict[str, tuple[int, ...]] = {}
    for view in message.views(1):
        item = Message(view, {1: BYTES, 2: BYTES})
        name = item.text(1)
        if name in groups:
            raise ValueError(f"group {name} is listed twice")
        groups[name] = _ranks(item.view(2))
    return GroupFile(groups, _ranks(message.view(2)))


def _ranks(view: memoryview) -> tuple[int, ...]:
    ranks = Message(view, {1: NUMBERS}).numbers(1, MOST)
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"ranks {list(ranks)}")
    return ranks
