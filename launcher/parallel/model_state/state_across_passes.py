"""Finds state that passes between forwards and backwards, which a pipeline runs in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.containers import mapped
from launcher.parallel.dispatch.modes import default_dtype, tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import contents_put_back, files_of, put_back
from launcher.parallel.model_state.python_state import changed, reading, snapshot
from launcher.parallel.model_state.reachable_code import hooks_backward
from launcher.parallel.model_state.references import OWN, inside

Batch = tuple[Any, Any]
"""The arguments of a module's call: positional, and by name."""

GRAD: Any = torch.Tensor.grad
"""The property with the gradient that a backward has left."""


def moved(model: nn.Module, leaf: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Returns the attributes and buffers of ``model`` that the backward of a call of its ``leaf`` changes.

    Forward and backward run on meta tensors. A hook may change attributes of other modules. Returns nothing
    for a hook that reads values. Changes in the files of the model and in containers are undone: otherwise a
    later check, which runs forwards before and after a backward, would find them everywhere.
    """
    if not any(map(hooks_backward, leaf.modules())):
        return []

    # a hook may raise anything for meta tensors
    left = put_back(files_of(model)), contents_put_back(model)
    with suppress(Exception), default_dtype(torch.float32), torch.device("meta"), left[0], left[1]:
        # a call
        args, kwargs = mapped((args, kwargs), _fresh)
        made = tree_leaves(leaf(*args, **kwargs))
        out = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]

        # its backward, which leaves no gradient behind
        before, versions = snapshot(model), _versions(model)
        torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        leaf.zero_grad(set_to_none=True)

        # attributes that are other objects now, and buffers that were changed in place
        names = [at for at, _ in changed(before, snapshot(model))]
        names += [at for at, version in _versions(model).items() if versions.get(at) != version]
        return [*dict.fromkeys(names)]
    return []


@dataclass(frozen=True)
class BackwardReads:
    """Lists what code reads that runs in the backward; hooks of parameters do not count.

    ``gradients``: parameters whose gradient it reads. ``others``: parameters, buffers and attributes of other
    modules that it reads by a reference in Python, each after the module that has the reference; attributes
    only if forwards change them. Tensors that the forward saved for the backward are not among them.
    """

    gradients: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


class _Reads(TorchFunctionMode):
    """Notes which tensors of a model are used while it is entered, and whose gradients are read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        named = (*model.named_parameters(), *model.named_buffers())
        self.names = {id(t): name for name, t in named}
        self.gradients: dict[str, None] = {}
        self.others: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [self.names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.names]
        if func == GRAD.__get__:
            self.gradients |= dict.fromkeys(used)
        elif getattr(func, "__name__", "") != "__get__":  # noted first: on meta, a read of values fails
            self.others |= dict.fromkeys(used)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and func != GRAD.__get__:  # a property such as data, and not a shape
            self.others |= dict.fromkeys(used)
        return out


def _references(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the modules with a Python reference to the owner of a tensor or attribute, and its name."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    known = {id(m) for m in model.modules()}
    for path, module in model.named_modules() if owners else ():
        below = {id(m) for m in module.modules()}
        referenced = {
            id(v) for n, value in vars(module).items() if n not in OWN for v in inside(value, known)
        }
        for name, of in owners.items():
            if id(of) in referenced and id(of) not in below:
                yield path, name


def backward_reads(model: nn.Module, inputs: Sequence[torch.Tensor]) -> BackwardReads:
    """Returns what code that runs in the backward reads, hooks of parameters aside.

    Forward and backward run on meta tensors, on a copy. What follows a read of values is not found.
    """
    if not any(map(hooks_backward, model.modules())):
        return BackwardReads()
    seen: _Reads | None = None
    left = put_back(files_of(model)), contents_put_back(model)
    with suppress(Exception), default_dtype(torch.float32), torch.device("meta"), left[0], left[1]:
        one = copied(model)
        before = snapshot(one)
        with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):  # other objects than the tensors
            made = tree_leaves(one(*(torch.empty_like(x, device="meta") for x in inputs)))
        out = tuple(t for t in made if isinstance(t, torch.Tensor) and t.requires_grad)
        kept = [name for name, _ in changed(before, snapshot(one))]
        seen = _Reads(one)
        with seen, reading(one, kept, lambda name: seen.others.setdefault(name)):
            # torch.autograd.backward would hide the mode from the code that it runs
            _engine_run_backward(
                out,
                tuple(map(torch.empty_like, out)),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
    if seen is None:
        return BackwardReads()
    return BackwardReads(tuple(seen.gradients), tuple(_references(seen.model, seen.others)))


def entangled(leaf: nn.Module, ready: Callable[[], tuple[nn.Module, Batch, Batch]]) -> str:
    """Returns which results change if another forward runs before the backward of ``leaf``; "" for none.

    ``ready`` returns a copy of ``leaf`` with values and two batches for it, equal in each call. Returns ""
    for a module that fails for these values, or that is not deterministic.
    """
    if not any(map(hooks_backward, leaf.modules())):
        return ""
    with suppress(Exception), torch.random.fork_rng(devices=[]):
        in_turn, again = _in_order(leaf, ready, False), _in_order(leaf, ready, False)
        ahead = _in_order(leaf, ready, True)
        if all(map(_equal, in_turn, again)):
            return next(
                (part for part, *two in zip(PARTS, in_turn, ahead, strict=True) if not _equal(*two)), ""
            )
    return ""


PARTS = BACKWARD, FORWARD = "backward", "forward"


def _in_order(
    leaf: nn.Module, ready: Callable[[], tuple[nn.Module, Batch, Batch]], ahead: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients of a first forward, and the outputs of a second.

    With ``ahead`` the second forward runs before the backward of the first.
    """
    with put_back(files_of(leaf)), contents_put_back(leaf):
        one, first, second = ready()
        inputs, out = _forward(one, first, 1)
        if ahead:
            _, after = _forward(one, second, 2)
            return _backward(one, inputs, out), [t.detach() for t in after]
        gradients = _backward(one, inputs, out)
        return gradients, [t.detach() for t in _forward(one, second, 2)[1]]


def _forward(leaf: nn.Module, batch: Batch, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the inputs that have gradients, and the output tensors."""
    torch.manual_seed(seed)
    inputs: list[torch.Tensor] = []

    def with_gradient(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t.clone()
        inputs.append(t.detach().clone().requires_grad_())
        return inputs[-1].clone()  # it may be changed in place

    args, kwargs = mapped(batch, with_gradient)
    made = tree_leaves(leaf(*args, **kwargs))
    return inputs, [t for t in made if isinstance(t, torch.Tensor)]


def _backward(leaf: nn.Module, inputs: list[torch.Tensor], made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of inputs and weights, without those that a forward has left."""
    torch.manual_seed(3)
    leaf.zero_grad()
    out = [t for t in made if t.requires_grad]
    torch.autograd.backward(out, [torch.randn_like(t) for t in out])
    return [t.grad.clone() for t in (*inputs, *leaf.parameters()) if t.grad is not None]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Returns true if two lists of tensors are equal up to rounding."""
    same = zip(a, b, strict=False)
    return len(a) == len(b) and all(x.shape == y.shape and bool(_close(x, y)) for x, y in same)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-9, equal_nan=True)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor like ``t`` that needs a gradient, and that may be changed in place."""
    out = torch.empty_like(t, device="meta")
    return out.requires_grad_().clone() if out.is_floating_point() or out.is_complex() else out


def _versions(leaf: nn.Module) -> dict[str, int]:
    return {at: b._version for at, b in leaf.named_buffers() if not b.is_inference()}
