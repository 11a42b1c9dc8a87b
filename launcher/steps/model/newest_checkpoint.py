"""Finds the newest undamaged checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from launcher.checkpoint.verify import damaged
from launcher.plan.resolve.encryption import Trust
from launcher.runtime.cluster.messages import all_gather
from launcher.runtime.cluster.world import World


def newest_undamaged(
    world: World, candidates: Iterable[Path], trust: Trust, say: Callable[[str], None]
) -> Path | None:
    """Returns the first undamaged checkpoint of ``candidates`` (newest first), or ``None``.

    All ranks call it. No user watches a restart, so this must detect damage: each rank reads its part of the
    files before any rank uses them.
    """
    for path in candidates:
        every = all_gather(damaged(path, trust, world.rank, world.size), list[str])
        wrong = [text for texts in every for text in texts]
        if not wrong:
            return path
        if world.rank == 0:
            say(f"{path.name} is damaged and skipped: {wrong[0]}")
    return None
