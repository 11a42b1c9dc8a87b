"""The functions that ranks run; they import the training engine only when they are called.

The process that starts the ranks sends them such a function. To send a function of ``on_ranks`` it would have
to import that module, which takes a second and 60 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.runtime.cluster.world import World
    from launcher.steps.sent_to_ranks import RankSteps


def run_rank_steps(world: World, todo: RankSteps) -> dict[str, Any]:
    """Returns ``on_ranks.run_rank_steps``, imported when it is called."""
    from launcher.steps import on_ranks

    return on_ranks.run_rank_steps(world, todo)


def with_shared_models(todo: RankSteps) -> Callable[[World], dict[str, Any]]:
    """Returns ``on_ranks.with_shared_models``, imported when it is called."""
    from launcher.steps import on_ranks

    return on_ranks.with_shared_models(todo)
