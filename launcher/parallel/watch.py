"""Watches a forward: inside which modules each parameter is used, and which units feed which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from launcher.plan.naming import owner
from launcher.plan.stages import covers


class Watch(TorchFunctionMode):
    """What was seen of the forward of a model, when it is over.

    ``scopes``: of every used parameter the deepest module around it that was running at each use. A weight that is
    used while its own module is not running must be gathered by one that is. ``calls``: how often each module ran.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        super().__init__()
        self.scopes: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self._units = frozenset(units)
        self._running: list[str] = [""]
        self._names: dict[int, list[str]] = {}
        self._alive: list[nn.Parameter] = []  # a freed one's id could come back as another's
        self._made: list[tuple[str, list[torch.Tensor]]] = []
        self._learn("", model)

    def _learn(self, prefix: str, module: nn.Module) -> None:
        for name, p in module.named_parameters(remove_duplicate=False):
            self._alive.append(p)
            full = f"{prefix}.{name}" if prefix else name
            if full not in self._names.setdefault(id(p), []):
                self._names[id(p)].append(full)

    def enter(self, name: str, module: nn.Module) -> None:
        """The module ``name`` begins to run; it may be a copy of the one in the model."""
        self._running.append(name)
        self.calls[name] += 1
        if any(id(p) not in self._names for p in module.parameters(recurse=False)):
            self._learn(name, module)

    def leave(self, name: str, output: Any) -> None:
        """It is done."""
        self._running.pop()
        if name in self._units:
            self._made.append((name, [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor | tuple | list):  # not what only asks for a shape
            for value in (*args, *(kwargs or {}).values()):
                for t in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(t, nn.Parameter) and id(t) in self._names:
                        self._use(self._names[id(t)])
        return out

    def _use(self, names: list[str]) -> None:
        """Of a tied parameter's names the one that fits best to what is running is the one in use."""
        seen = {n: max((m for m in self._running if covers(m, owner(n))), key=len) for n in names}
        name = max(names, key=lambda n: (seen[n] == owner(n), len(seen[n])))
        self.scopes[name] = min(self.scopes.get(name, seen[name]), seen[name], key=len)

    def chains(self) -> tuple[tuple[str, str], ...]:
        """(a, b): unit b ran once, right after unit a, and works on what a made, so its backward is over before a's."""
        return tuple(
            (a, b)
            for (a, made), (b, last) in zip(self._made, self._made[1:], strict=False)
            if self.calls[a] == self.calls[b] == 1 and _feeds(made, last)
        )


def _feeds(made: list[torch.Tensor], last: list[torch.Tensor]) -> bool:
    """Whether autograd can go from every tensor of ``last`` back to one of ``made``."""
    goals = {t.grad_fn for t in made if t.grad_fn is not None}
    if not goals or not last:
        return False
    oldest = min(g._sequence_nr() for g in goals)
    return all(t.grad_fn is not None and _reaches(t.grad_fn, goals, oldest) for t in last)


def _reaches(start: Any, goals: set[Any], oldest: int) -> bool:
    """Nodes made before the ``oldest`` goal cannot lead to it."""
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= oldest:
                seen.add(following)
                stack.append(following)
    return False


@contextmanager
def watching(model: nn.Module, units: Iterable[str]) -> Iterator[Watch]:
    """Watch what runs meanwhile. ``model`` keeps the hooks: hand over a copy."""
    watch = Watch(model, units)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, _, name=name: watch.enter(name, m), prepend=True)
        module.register_forward_hook(lambda _, __, out, name=name: watch.leave(name, out), always_call=True)
    with watch:
        yield watch
