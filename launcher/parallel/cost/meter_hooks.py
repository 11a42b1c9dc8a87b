"""What a forward that runs again tells those who plan: what it keeps, and when it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

KEEPING: ContextVar[Callable[[torch.Tensor], Any] | None] = ContextVar("keeping", default=None)
"""Is told of a tensor that is kept for a backward without autograd's knowledge."""

Sent = list[tuple[str, int]]
"""Collectives: a kind, and its bytes."""

AGAIN: ContextVar[Callable[[Callable[[], Sent]], AbstractContextManager[Any]] | None] = ContextVar(
    "again", default=None
)
"""Makes what is entered around a forward that runs again; it may ask what that has sent."""

PLAIN: ContextVar[bool] = ContextVar("plain", default=False)
"""Whether forwards run as they would if nothing ran again."""
