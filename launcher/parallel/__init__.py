"""Makes modules obey the plan: read, split, materialize, shard, tie, check.

The only folder that wraps modules. It decides nothing, opens no file, and knows no Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.parallel.broadcast import parameter_broadcast
    from launcher.parallel.user_script import parallelize, sync_pipeline_shared_parameters

__all__ = ["parallelize", "parameter_broadcast", "sync_pipeline_shared_parameters"]

_HOMES = {
    "parallelize": "user_script",
    "sync_pipeline_shared_parameters": "user_script",
    "parameter_broadcast": "broadcast",
}


def __getattr__(name: str) -> Any:
    """Imports names on first access: a planner that reads a model must not import FSDP2."""
    if name not in _HOMES:
        raise AttributeError(f"module 'launcher.parallel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"launcher.parallel.{_HOMES[name]}"), name)
