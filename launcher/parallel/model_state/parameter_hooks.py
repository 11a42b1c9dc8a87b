"""Keeps the hooks of a parameter when it gets its memory."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils import swap_tensors


def hooks(p: nn.Parameter) -> bool:
    """Whether any hook is registered on ``p``."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def keep(before: nn.Parameter, now: nn.Parameter) -> None:
    """Give ``before`` the content of ``now`` and keep its hooks: other code may refer to this very object."""
    if before is now:
        return
    each = list((before._backward_hooks or {}).values())
    after: list[Any] = list((before._post_accumulate_grad_hooks or {}).values())
    before._backward_hooks = None
    before._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    swap_tensors(before, now)
    for hook in each:
        before.register_hook(hook)
    for hook in after:
        before.register_post_accumulate_grad_hook(hook)
