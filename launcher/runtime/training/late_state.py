"""Reports Python state of a model that changes after the calls that the plan has tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import nn

from launcher.parallel.digests import digests
from launcher.parallel.model_state.module_globals import files_of, named_variables
from launcher.parallel.model_state.python_state import PLAIN, PythonState, library, snapshot
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.values.module_names import listed
from launcher.runtime.cluster.messages import all_gather

Digests = dict[str, str]
"""For each attribute or variable a text that changes when its value changes."""
LARGE = 1 << 24
"""Arrays of more bytes are not compared: each comparison would copy them."""


@dataclass
class LateState:
    """The state of a rank's modules, and of the variables of their files.

    An attribute that the second step changes and the third one too is assumed to change in every step, so the
    plan has seen it change. ``known`` contains those attributes, and those that a note has named. What a
    callback changes between two steps was never seen by the plan.
    """

    first: Digests = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    _steps: int = 0
    _moved: list[set[str]] = field(default_factory=list)
    _files: list[str] | None = None

    @contextmanager
    def around(self, model: ParallelModel) -> Iterator[None]:
        """Compares the state before and after each of the first three steps; every step runs in it."""
        before = self._digests(model) if self._steps in (1, 2) else {}
        yield
        self._steps += 1
        if self._steps == 1:
            self.first = self._digests(model)
        elif self._steps <= 3:
            self._moved.append({*changed(before, self._digests(model))})
        if self._steps == 3:
            self.known |= set.intersection(*self._moved)

    def notes(self, model: ParallelModel) -> list[str]:
        """Returns notes on what changed since the first step; every rank calls this, between two steps."""
        now, new = Digests(), list[str]()
        if self._steps >= 3:
            now = self._digests(model)
            new = [name for name in changed(self.first, now) if name not in self.known]
        names = [*dict.fromkeys(name for theirs in all_gather(new, list[str]) for name in theirs)]
        if not names:
            return []

        self.known.update(names)
        every = all_gather({name: now[name] for name in names if name in now}, Digests)
        different = [name for name in names if len({theirs[name] for theirs in every if name in theirs}) > 1]
        return _texts(names, different)

    def _digests(self, model: ParallelModel) -> Digests:
        if self._files is None:
            self._files = [n for n in files_of(*(p.module for p in model.parts)) if not library(n)]
        return _digests_of_modules(model) | _digests_of_variables(self._files)


def _texts(names: list[str], different: list[str]) -> list[str]:
    text = f"{listed(names)} changed after the first step, by a forward or a callback"
    lost = "no checkpoint contains it, so a resumed run resets it"
    out = [f"{text}; {lost}; register it as a persistent buffer, or return it from get_extra_state"]
    if different:
        text = f"{listed(different)} differs between ranks"
        out.append(f"{text}: if a forward reads it, this layout trains other weights than one rank")
    return out


def changed(before: Digests, after: Digests) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _digests_of_variables(files: Sequence[str]) -> Digests:
    """Returns a digest of each variable of these Python modules; large arrays are left out."""
    state = PythonState()
    for name, value in named_variables(files):
        if not isinstance(value, np.ndarray) or value.nbytes <= LARGE:
            state.enter(name, value)
    return _joined(state)


def attribute_digests(value: object) -> Digests:
    """Returns a digest of each attribute of an object of the user's."""
    state = PythonState()
    for name, part in getattr(value, "__dict__", {}).items():
        state.enter(name, part)
    return _joined(state)


def _joined(state: PythonState) -> Digests:
    """Returns one digest for each name in ``state``, of all parts of its value."""
    out: dict[str, list[str]] = {}
    for (name, path), mark in state.marks.items():
        out.setdefault(name, []).append(f"{path}={_text(mark)}")
    return {name: xxhash.xxh3_64_hexdigest("\n".join(each).encode()) for name, each in out.items()}


def _digests_of_modules(model: ParallelModel) -> Digests:
    """Returns a digest of each attribute with Python state, and of each buffer that checkpoints leave out.

    Modules that override ``get_extra_state`` are left out: they decide what checkpoints contain of them.
    """
    out = Digests()
    buffers: dict[str, torch.Tensor] = {}
    for part in model.parts:
        modules = dict(part.module.named_modules())
        storing = {n for n, m in modules.items() if type(m).get_extra_state is not nn.Module.get_extra_state}
        texts = _joined(snapshot(part.module))
        out |= {name: text for name, text in texts.items() if name.rpartition(".")[0] not in storing}
        for owner in modules.keys() - storing:
            for own in modules[owner]._non_persistent_buffers_set:
                if (t := modules[owner]._buffers[own]) is not None:
                    buffers[f"{owner}.{own}".lstrip(".")] = t
    numbers = digests([*buffers.values()]).tolist() if buffers else []
    return out | dict(zip(buffers, map(str, numbers), strict=True))


def _text(mark: object) -> str:
    """Returns the value of plain data, and the class of any other object, which is not kept alive."""
    if isinstance(mark, bytes):  # an array may have many
        return xxhash.xxh3_64_hexdigest(mark)
    if isinstance(mark, PLAIN):
        return repr(mark)
    if isinstance(mark, type):
        return mark.__qualname__
    if isinstance(mark, tuple | list):
        return f"({', '.join(map(_text, mark))})"
    if isinstance(mark, frozenset):
        return f"{{{', '.join(sorted(map(_text, mark)))}}}"
    return type(mark).__qualname__
