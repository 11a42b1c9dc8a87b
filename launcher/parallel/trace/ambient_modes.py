"""The autograd, autocast and default-dtype modes that traced code ran in, entered again by its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def _kinds() -> tuple[str, ...]:
    """The kinds of device that a model may work on here."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@dataclass(frozen=True)
class Ambient:
    """``grad``: whether autograd records; ``autocast``: the dtype of each kind of device that it is on for.

    ``dtype``: that of new tensors which are given none.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    dtype: torch.dtype

    @property
    def casts(self) -> bool:
        return any(dtype is not None for _, dtype in self.autocast)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                if dtype is not None or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            yield


def ambient() -> Ambient:
    """The modes of this moment."""
    on = torch.is_autocast_enabled
    casts = tuple((k, torch.get_autocast_dtype(k) if on(k) else None) for k in _kinds())
    return Ambient(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=casts,
        dtype=torch.get_default_dtype(),
    )


@dataclass(frozen=True)
class UnderModes:
    """``func`` as a function that enters ``modes`` for its call; fx writes it into code by its name."""

    func: Callable[..., Any]
    modes: Ambient

    @property
    def __name__(self) -> str:
        return f"under_{getattr(self.func, '__name__', 'call')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.modes.entered():
            return self.func(*args, **kwargs)
