"""Real ranks for a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from launcher.runtime.start import run_ranks
from launcher.runtime.world import World

T = TypeVar("T")


def on_ranks(size: int, work: Callable[..., T], *args: Any, timeout_s: float = 60, **options: Any) -> list[T]:
    """``work(world, *args)`` on ``size`` forked gloo ranks; results in rank order. ``options`` are ``run_ranks``'s."""

    def call(world: World) -> T:
        return work(world, *args)

    return run_ranks(call, size, timeout_s=timeout_s, **options)
