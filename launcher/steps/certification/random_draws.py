"""Draws of a forward that are equal in every layout: a tensor of one shape always gets the same numbers.

A layout and one process run the same micro batches through the same modules, but in another order, from other
random streams, and some of it twice. So the numbers of a draw must come from what the two have in common: its
shape. A mask is then the same for the same sample and position, wherever it is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from launcher.errors import RunError
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves, tree_map_only
from launcher.parallel.trace.state_effects import is_dropout

MANY = 10_000
"""Draws of one shape in a row that no forward makes, unless it draws until it likes what it gets."""


def undropped(modules: Iterable[nn.Module]) -> None:
    """Dropout modules of torch off; other draws are made equal."""
    for m in (m for module in modules for m in module.modules() if is_dropout(m)):
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0
        else:
            m.p = 0.0  # type: ignore[assignment]


class EqualDraws(Dispatch):
    """Enter it around forwards and backwards. ``drew``: whether anything did."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self._last, self._same = "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drew = True
        shape = _shape(args, kwargs)
        self._same = self._same + 1 if shape == self._last else 0
        self._last = shape
        if self._same > MANY:
            text = f"the forward draws {MANY} times in a row numbers of the shape {shape}"
            raise RunError(f"{text}: it draws until it likes them, which cannot be certified")
        seed = crc32(shape.encode())
        with torch.random.fork_rng(_devices(args, kwargs)):
            torch.manual_seed(seed)
            args, kwargs = tree_map_only(torch.Generator, lambda g: None, (args, kwargs))
            return func(*args, **kwargs)


def _shape(args: Any, kwargs: Any) -> str:
    """That of the first tensor, or what a factory is told."""
    leaves = tree_leaves((args, kwargs))
    first = next((tuple(a.shape) for a in leaves if isinstance(a, Tensor)), None)
    return str(first if first is not None else [a for a in leaves if type(a) is int])


def _devices(args: Any, kwargs: Any) -> list[torch.device]:
    """The accelerators that it may draw on."""
    leaves = tree_leaves((args, kwargs))
    found = [a.device for a in leaves if isinstance(a, Tensor)]
    found += [torch.device(a) for a in (kwargs.get("device"),) if a is not None]
    return [d for d in found[:1] if d.type == "cuda"]


class ForeignDraws:
    """The modules of ``model`` that draw from Python's or numpy's random stream, which no layout makes equal.

    ``foreign`` has their names, and what they draw from.
    """

    def __init__(self, model: nn.Module) -> None:
        self.foreign: dict[str, str] = {}
        self._model = model
        self._before: list[tuple[Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The innermost module that draws is told first."""
        hooks = []
        for name, module in self._model.named_modules():
            left = lambda m, args, out, name=name: self._left(name)  # noqa: E731
            hooks.append(module.register_forward_pre_hook(lambda m, args: self._before.append(_states())))
            hooks.append(module.register_forward_hook(left, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._before.clear()

    def _left(self, name: str) -> None:
        before, now = self._before.pop(), _states()
        for stream, was, state in zip(("Python's random", "numpy.random"), before, now, strict=True):
            if was != state and not any(covered(name, n) for n in self.foreign):
                self.foreign[name] = stream


def covered(outer: str, name: str) -> bool:
    """Whether the module ``name`` is inside of ``outer``, or is it."""
    return not outer or name == outer or name.startswith(outer + ".")


def _states() -> tuple[Any, Any]:
    """Of the streams that are not torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(np.asarray(keys)), *rest)
