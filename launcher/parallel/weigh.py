"""What the backward of a module needs beyond what was saved for it, tried out on meta tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.parallel.flash import Flash
from launcher.parallel.held import Held
from launcher.parallel.mode import default_dtype
from launcher.plan.facts import Backward


class _Meta(Held):
    """Counts meta tensors, but no gradients of parameters: those are planned by themselves."""

    kind = "meta"

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = params

    @property
    def now(self) -> int:
        return super().now - sum(p.grad.untyped_storage().nbytes() for p in self.params if p.grad is not None)


class _Running(ExitStack):
    """A forward on meta, as the planner runs it."""

    def __enter__(self) -> Self:
        super().__enter__()
        for mode in (default_dtype(torch.float32), torch.device("meta"), Flash()):
            self.enter_context(mode)
        return self


class Scales:
    """Weighs modules; equal ones once."""

    def __init__(self) -> None:
        self._known: dict[Any, Backward] = {}

    def weigh(self, module: nn.Module, args: Any, kwargs: Any) -> Backward:
        """For a call with ``args`` and ``kwargs``; zeros when it cannot be tried."""
        given = tree_leaves((args, kwargs))
        key = (
            type(module),
            str(module),
            tuple((n, p.shape, p.dtype) for n, p in module.named_parameters()),
            tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else repr(t) for t in given),
        )
        if key not in self._known:
            self._known[key] = _tried(module, args, kwargs)
        return self._known[key]


def _tried(module: nn.Module, args: Any, kwargs: Any) -> Backward:
    if any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).to("meta")  # a part of a model that looks at data
    params = [p for p in module.parameters() if p.requires_grad]
    with _disable_current_modes(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), _Running():
        args, kwargs = tree_map_only(torch.Tensor, _leaf, (args, kwargs))
        scale = _Meta(params)
        try:
            with scale, torch.enable_grad(), _ends(module) as ends:
                out = [
                    t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
                ]
                before = scale.peak = scale.now
                kept, freed = _bytes(ends.made), _bytes(ends.given)
                ends.made.clear()
                ends.given.clear()
                torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        except (RuntimeError, NotImplementedError):
            return Backward()  # it looks at data, or has no backward
        finally:
            for p in params:
                p.grad = None
    return Backward(max(0, scale.peak - before), kept, freed)


class _Ends:
    """What modules with parameters of their own were ``given`` and have ``made``."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []

    def see(self, _: nn.Module, args: Any, out: Any) -> None:
        self.given += [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        self.made += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


@contextmanager
def _ends(module: nn.Module) -> Iterator[_Ends]:
    ends = _Ends()
    own = [m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    handles = [m.register_forward_hook(ends.see) for m in own]
    try:
        yield ends
    finally:
        for handle in handles:
            handle.remove()


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Of the storages, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to("meta").requires_grad_(t.is_floating_point())
