"""Gathers weights again for a backward, instead of saving them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.extras.device_matrix.redistribution import Redistribution
from launcher.extras.device_matrix.run.program import StageGroups, carry_out


@dataclass(frozen=True)
class _Saved:
    """Stands for a saved tensor that shares memory with what was gathered from ``kept``."""

    name: str
    kept: Tensor
    plan: Redistribution
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather:
    """While entered, a forward saves how to gather the registered weights instead of the tensors.

    All ranks of a stage run the same backward, and so gather in the same order. ``count`` has the number of
    gathers in backwards, by name.
    """

    def __init__(self, groups: StageGroups) -> None:
        self.groups = groups
        self.count: Counter[str] = Counter()
        self._saved_of: dict[int, tuple[weakref.ref[Any], _Saved]] = {}
        self._hooks: Any = None

    def enter(self, name: str, full: Tensor, kept: Tensor, plan: Redistribution) -> None:
        """Registers ``full``, which was gathered from ``kept`` by ``plan``."""
        storage = full.untyped_storage()
        saved = _Saved(name, kept.detach(), plan, (), (), 0)
        self._saved_of[storage._cdata] = weakref.ref(storage), saved

    def __enter__(self) -> None:
        if torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)
            self._hooks = None
        self._saved_of.clear()

    def _pack(self, t: Tensor) -> Tensor | _Saved:
        storage = t.untyped_storage()
        known = self._saved_of.get(storage._cdata)
        if known is None or known[0]() is not storage or t.dtype != known[1].kept.dtype:
            return t.detach()  # a result that is saved by its own operation would keep the graph alive
        saved = known[1]
        return _Saved(saved.name, saved.kept, saved.plan, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.count[saved.name] += 1
        full = carry_out(saved.kept, saved.plan, self.groups)
        return full.as_strided(saved.shape, saved.stride, saved.offset)
