"""Makes the random draws of a forward equal in every layout: they depend only on the tensor's shape.

A layout and one process run the same micro batches through the same modules, but in another order, from other
random states, and some of it twice. So the values of a draw must come from what the two have in common: its
shape. A mask is then the same for the same sample and position, wherever it is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

MANY = 10_000
"""More consecutive draws of one shape than this come only from rejection sampling."""


class EqualDraws(TorchDispatchMode):
    """A mode for forwards and backwards. ``drew``: whether anything was drawn.

    Raises ``RuntimeError`` if a forward would repeat the same draw forever.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self._last, self._same = "", 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True

        # rejection sampling would always get the same values
        leaves = list(_leaves((args, kwargs)))
        shape = _shape(leaves)
        self._same = self._same + 1 if shape == self._last else 0
        self._last = shape
        if self._same > MANY:
            text = f"the forward draws numbers of the shape {shape} {MANY} times in a row"
            raise RuntimeError(f"{text}, as rejection sampling does, so two trainings cannot be compared")

        # use the default generators, whichever was passed
        args, kwargs = _without_generators(args), _without_generators(kwargs)
        device = kwargs.get("device") or next((a.device for a in leaves if isinstance(a, Tensor)), "cpu")
        at = torch.device(device)
        devices, kind = ([at], at.type) if _own_streams(at) else ([], None)
        with torch.random.fork_rng(devices, device_type=kind or "cpu"):
            torch.manual_seed(crc32(shape.encode()))
            return func(*args, **kwargs)


# The same code as ``draws`` in ``parallel/dispatch/modes.py``, not imported: the oracle runs nothing that it
# judges. It may be the same: an operator that it misses draws other numbers on the two sides, so the
# certificate fails. No error in it makes two trainings agree.
def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns true if an operator draws random numbers; attention draws only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, a in enumerate(func._schema.arguments):
        if a.name in ("dropout", "dropout_p"):
            return bool(args[n] if n < len(args) else kwargs.get(a.name, a.default_value))
    return True


def _own_streams(device: torch.device) -> bool:
    """Returns true if a kind of device has its own random state, in addition to the CPU's."""
    return device.type not in ("cpu", "meta")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def _without_generators(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_generators(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_without_generators, value))
    return None if isinstance(value, torch.Generator) else value


def _shape(leaves: list[Any]) -> str:
    """Returns the shape of the first tensor, or the integer arguments of a factory function."""
    first = next((tuple(a.shape) for a in leaves if isinstance(a, Tensor)), None)
    return str(first if first is not None else [a for a in leaves if type(a) is int])


class ForeignDraws:
    """Finds modules of ``model`` that draw from Python's or numpy's random state, which are not made equal.

    ``foreign`` maps their names to what they draw from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.foreign: dict[str, str] = {}
        self._model = model
        self._before: list[tuple[Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observes forwards in the block; records the innermost module that draws."""
        hooks = []
        for name, module in self._model.named_modules():
            after_forward = lambda m, args, out, name=name: self._after_module(name)  # noqa: E731
            hooks.append(module.register_forward_pre_hook(lambda m, args: self._before.append(_states())))
            hooks.append(module.register_forward_hook(after_forward, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._before.clear()

    def _after_module(self, name: str) -> None:
        before, now = self._before.pop(), _states()
        for stream, was, state in zip(("Python's random", "numpy.random"), before, now, strict=True):
            inside = name + "." if name else ""
            if was != state and not any(n == name or n.startswith(inside) for n in self.foreign):
                self.foreign[name] = stream


def _states() -> tuple[Any, Any]:
    """Returns the random states of Python and numpy."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(np.asarray(keys)), *rest)
