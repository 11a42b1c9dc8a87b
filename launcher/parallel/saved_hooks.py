"""Hooks on what autograd saves that step aside for torch.func.grad, which runs under none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.autograd import graph

PLAIN: Any = graph.disable_saved_tensors_hooks

_active: list[SavedHooks] = []
_aside: list[SavedHooks] = []


def stepped_aside() -> bool:
    """Whether code runs that hooks do not see."""
    return bool(_aside)


class SavedHooks:
    """``keep`` gets every tensor that is saved while this is entered, and what it returns is saved instead."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keep, self._plain = keep, PLAIN
        self._use: Callable[[torch.Tensor], torch.Tensor] = lambda t: t

    def push(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self._keep, self._use)

    def pop(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def on_top(self) -> bool:
        """Whether nobody has entered others since."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[1] is self._use

    def __enter__(self) -> None:
        self.push()
        _active.append(self)
        self._plain, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, _disabling

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        graph.disable_saved_tensors_hooks = self._plain
        _active.remove(self)
        self.pop()


@contextmanager
def _disabling(error_message: str) -> Iterator[None]:
    """As torch's own, which raises where there are hooks, but for ours."""
    out: list[SavedHooks] = []
    for hooks in reversed(_active):
        if hooks not in _aside and hooks.on_top():
            hooks.pop()
            out.append(hooks)
    _aside.extend(out)
    try:
        with PLAIN(error_message):
            yield
    finally:
        for hooks in reversed(out):
            _aside.remove(hooks)
            hooks.push()
