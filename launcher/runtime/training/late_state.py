"""Reports Python state of modules that changes after the calls that the plan has tried."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import xxhash
from torch import nn

from launcher.parallel.digests import digests
from launcher.parallel.model_state.python_state import PLAIN, snapshot
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.values.module_names import listed
from launcher.runtime.cluster.messages import all_gather

Digests = dict[str, str]
"""For each attribute a text that changes when its value changes."""


@dataclass
class LateState:
    """The state of a rank's modules after each of the first three steps.

    An attribute that changes both in the second step and in the third is assumed to change in every step, so
    the plan has seen it change. ``known`` contains those attributes, and those that a note has named.
    """

    first: list[Digests] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def follow(self, model: ParallelModel) -> None:
        """Records the state after each of the first three steps; every step calls this at its end."""
        if len(self.first) == 3:
            return
        self.first.append(_digests(model))
        if len(self.first) == 3:
            one, two, three = self.first
            self.known.update({*_changed(one, two)} & {*_changed(two, three)})

    def notes(self, model: ParallelModel) -> list[str]:
        """Returns notes on what changed since the first step; every rank calls this, between two steps."""
        now, new = Digests(), list[str]()
        if len(self.first) == 3:
            now = _digests(model)
            new = [name for name in _changed(self.first[0], now) if name not in self.known]
        names = [*dict.fromkeys(name for theirs in all_gather(new, list[str]) for name in theirs)]
        if not names:
            return []

        self.known.update(names)
        every = all_gather({name: now[name] for name in names if name in now}, Digests)
        different = [name for name in names if len({theirs[name] for theirs in every if name in theirs}) > 1]
        return _texts(names, different)


def _texts(names: list[str], different: list[str]) -> list[str]:
    text = f"{listed(names)} changed after the first step, by a forward or a callback"
    lost = "no checkpoint contains it, so a resumed run resets it"
    out = [f"{text}; {lost}; register it as a persistent buffer, or return it from get_extra_state"]
    if different:
        text = f"{listed(different)} differs between ranks that have the same module"
        out.append(f"{text}: if a forward reads it, this layout trains other weights than one rank")
    return out


def _changed(before: Digests, after: Digests) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _digests(model: ParallelModel) -> Digests:
    """Returns a digest of each attribute with Python state, and of each buffer that checkpoints leave out.

    Modules that override ``get_extra_state`` are left out: they decide what checkpoints contain of them.
    """
    out: dict[str, list[str]] = {}
    buffers: dict[str, torch.Tensor] = {}
    for part in model.parts:
        modules = dict(part.module.named_modules())
        storing = {n for n, m in modules.items() if type(m).get_extra_state is not nn.Module.get_extra_state}
        for (name, path), mark in snapshot(part.module).marks.items():
            if name.rpartition(".")[0] not in storing:
                out.setdefault(name, []).append(f"{path}={_text(mark)}")
        for owner in modules.keys() - storing:
            for own in modules[owner]._non_persistent_buffers_set:
                if (t := modules[owner]._buffers[own]) is not None:
                    buffers[f"{owner}.{own}".lstrip(".")] = t
    texts = {name: xxhash.xxh3_64_hexdigest("\n".join(each).encode()) for name, each in out.items()}
    numbers = digests([*buffers.values()]).tolist() if buffers else []
    return texts | dict(zip(buffers, map(str, numbers), strict=True))


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
