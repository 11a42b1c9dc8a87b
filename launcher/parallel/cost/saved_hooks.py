"""Hooks on tensors that a backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import _disable_current_modes

KEEPING: ContextVar[Callable[[torch.Tensor], Any] | None] = ContextVar("keeping", default=None)
"""A callback for each tensor that is kept for a backward without autograd's knowledge."""

Sent = list[tuple[str, int]]
"""Collectives: the kind and the bytes of each."""

AGAIN: ContextVar[Callable[[Callable[[], Sent]], AbstractContextManager[Any]] | None] = ContextVar(
    "again", default=None
)
"""Returns a context manager to enter around a recomputed forward.

Its argument returns the collectives that this forward has run so far.
"""

PLAIN: ContextVar[bool] = ContextVar("plain", default=False)
"""Whether forwards run as if nothing were recomputed."""


def _packed(hooks: SavedHooks | None, t: torch.Tensor) -> torch.Tensor:
    """Returns what is saved for ``t`` by ``hooks``, which are entered."""
    assert hooks is not None
    kept = hooks.keep(t)
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # it is no operation of the forward
        return kept.detach()


class SavedHooks:
    """Passes every saved tensor to ``keep`` while entered, and saves a detached alias of what that returns.

    Autograd's graph keeps the hooks and what they return, and Python's collector does not look into it. A
    graph that refers to itself there is never freed: by an operation that saves its own result, or by a
    ``keep`` that leads back to the graph. So what is saved is detached, and the graph refers weakly to this.
    ``suspended`` is true while the hooks are suspended, for code that allows no hooks on saved tensors.
    """

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keep = keep
        self._use: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
        self._disable: Any = None
        self._token: Token[Any] | None = None
        self.suspended = False

    def __enter__(self) -> None:
        self._push()
        self._token = KEEPING.set(self.keep)
        self._disable, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, self._disabling

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        graph.disable_saved_tensors_hooks = self._disable
        assert self._token is not None
        KEEPING.reset(self._token)
        self._pop()

    @contextmanager
    def _disabling(self, error_message: str) -> Iterator[None]:
        """Suspends these hooks, and those of any ``SavedHooks`` entered before, while torch disables hooks.

        torch's function raises if hooks are active, so it still raises for hooks of other code.
        """
        if self.suspended or not self._on_top():
            with self._disable(error_message):
                yield
            return
        self._pop()
        self.suspended = True
        try:
            with self._disable(error_message):
                yield
        finally:
            self.suspended = False
            self._push()

    def _push(self) -> None:
        this = ref(self)
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: _packed(this(), t), self._use)

    def _pop(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _on_top(self) -> bool:
        """Returns true if no other hooks were entered since."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[1] is self._use
