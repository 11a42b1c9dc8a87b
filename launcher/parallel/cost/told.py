"""What a forward that runs again tells those who plan: what it keeps, and when it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

KEEPING: ContextVar[Callable[[torch.Tensor], Any] | None] = ContextVar("keeping", default=None)
"""Is told of a tensor that is kept for a backward without autograd's knowledge."""

Around = Callable[[str, nn.Module], AbstractContextManager[Any]]

AGAIN: ContextVar[Around | None] = ContextVar("again", default=None)
"""Makes what is entered around a module, of this name, that runs again."""
