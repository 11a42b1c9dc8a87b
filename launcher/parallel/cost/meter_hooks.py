"""What a recomputed forward reports to the planner: what it keeps, and when it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

KEEPING: ContextVar[Callable[[torch.Tensor], Any] | None] = ContextVar("keeping", default=None)
"""A callback for each tensor that is kept for a backward without autograd's knowledge."""

Sent = list[tuple[str, int]]
"""Collectives: a kind, and its bytes."""

AGAIN: ContextVar[Callable[[Callable[[], Sent]], AbstractContextManager[Any]] | None] = ContextVar(
    "again", default=None
)
"""Makes the context that is entered around a recomputed forward; its argument returns what that has sent."""

PLAIN: ContextVar[bool] = ContextVar("plain", default=False)
"""Whether forwards run as if nothing were recomputed."""
