"""Numbers for a module that looks at data: first samples of the data set, weights of the constructor.

A plan follows a forward on tensors without numbers. Of those that are inputs of the model, or come of inputs
and constants alone (masks, lengths, positions), the numbers are known all the same, for a few batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves, tree_map_only

LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default)

FEW = 1 << 24
"""Numbers of a module, or of a batch, that are tried at most: larger ones are zeros, which take no memory."""


@dataclass(frozen=True)
class Trial:
    """``batches``: of the inputs, dim 0 that of samples, as many as a batch needs are taken of them in turn.

    The first is tried first; the others may have other lengths, ids and so on. ``initial``: the numbers that
    the constructor gave a tensor, by its name.
    """

    batches: tuple[tuple[Tensor, ...], ...]
    initial: Callable[[str], Tensor]


_TRIAL: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextmanager
def tried_with(trial: Trial | None) -> Iterator[None]:
    """Modules that look at data are tried with these numbers meanwhile; ``None``: with zeros."""
    token = _TRIAL.set(trial)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def initial(name: str, t: Tensor) -> Tensor | None:
    """The constructor's numbers for ``t``; ``None`` where this rank has a part of it, or nobody knows."""
    trial = _TRIAL.get()
    if trial is None:
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.device("cpu"):
            value = trial.initial(name)
    except Exception:  # what cannot be made again alone: the rank will say so
        return None
    return value.to(t.dtype) if value.shape == t.shape else None


def trying() -> bool:
    """Whether there are numbers to try with."""
    return _TRIAL.get() is not None


class SampleValues(Dispatch):
    """Enter it around a forward on ``given``: it knows the numbers of what comes of them and of constants.

    ``beyond``: modules that look up more than their table has, each with its rows and the largest id.
    """

    def __init__(self, given: Sequence[Tensor], running: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.beyond: dict[str, tuple[int, int]] = {}
        trial = _TRIAL.get()
        batches = trial.batches if trial is not None else ()
        self.batches = len(batches)
        self._known: dict[int, tuple[weakref.ref[Tensor], list[Tensor]]] = {}
        self._lost: set[int] = set()
        for place, t in enumerate(given):
            values = [_fitted(batch[place], t) if place < len(batch) else None for batch in batches]
            self._learn(t, values)

    def of(self, t: Tensor, batch: int = 0) -> Tensor | None:
        """The numbers of ``t`` for one of the batches, to be changed by whoever asks."""
        found = self._find(t)
        return None if found is None or batch >= len(found) else found[batch].clone()

    def _find(self, t: Tensor) -> list[Tensor] | None:
        found = self._known.get(id(t))
        known = found is not None and found[0]() is t and t.untyped_storage()._cdata not in self._lost
        return found[1] if found is not None and known else None

    def _learn(self, t: Tensor, values: Sequence[Any]) -> None:
        if values and all(isinstance(v, Tensor) and (v.shape, v.dtype) == (t.shape, t.dtype) for v in values):
            self._known[id(t)] = weakref.ref(t), [*values]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.batches:
            return out
        if func in LOOKUPS:
            self._look_up(args[0], args[1])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_meta]
        if not made or not all(t.is_meta and t.layout is torch.strided for t in (*given, *made)):
            return out
        known = [self._find(t) for t in given]
        large = sum(t.numel() for t in made) > FEW
        if None in known or large or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._lost |= {t.untyped_storage()._cdata for t in made}
            return out
        results = [self._carried_out(func, args, kwargs, batch) for batch in range(self.batches)]
        for at, t in enumerate(made):
            self._learn(t, [r[at] if at < len(r) else None for r in results])
        return out

    def _look_up(self, table: Tensor, ids: Tensor) -> None:
        """Note the largest id that a table has no row for; on meta it is looked up all the same."""
        most = max((int(v.max()) for v in self._find(ids) or () if v.numel()), default=-1)
        if most >= len(table):
            self.beyond[self.running()] = len(table), most

    def _carried_out(self, func: Any, args: Any, kwargs: Any, batch: int) -> list[Tensor]:
        """What comes of the numbers of one batch; nothing where they cannot be had."""
        real = partial(tree_map_only, Tensor, lambda t: (self._find(t) or [])[batch])
        on_cpu = partial(tree_map_only, torch.device, lambda d: torch.device("cpu"))
        with _disable_current_modes(), torch.no_grad():
            try:
                out = func(*on_cpu(real(args)), **on_cpu(real(kwargs)))
            except (RuntimeError, IndexError, NotImplementedError):  # then nobody knows
                return []
        return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _fitted(samples: Tensor, t: Tensor) -> Tensor | None:
    """As many of the ``samples`` as ``t`` has, in turn, and of sequences as much."""
    if not len(samples) or samples.dim() != t.dim() or t.numel() > FEW:
        return None
    out = samples[torch.arange(t.shape[0], device="cpu") % len(samples)]
    for dim in range(1, t.dim()):
        if out.shape[dim] < t.shape[dim]:
            return None
        out = out.narrow(dim, 0, t.shape[dim])
    return out.to(t.dtype).clone()
