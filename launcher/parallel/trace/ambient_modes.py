"""The autograd, autocast and default-dtype modes of traced code, which its stage enters again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def _kinds() -> tuple[str, ...]:
    """Return the kinds of device that a model may use here."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@dataclass(frozen=True)
class Ambient:
    """The modes at one place of the code.

    ``grad``: whether autograd records. ``autocast``: its dtype per kind of device, or ``None``. ``dtype``:
    the default dtype of new tensors.
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
    """Return the present modes."""
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
