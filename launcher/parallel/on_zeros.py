"""Runs what looks at data, or autocast, on zeros in memory, where the rest of a forward runs on meta tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from launcher.parallel.copied import copied
from launcher.parallel.cost import Meter
from launcher.parallel.pytree import tree_map_only
from launcher.parallel.structure import mapped, tensors
from launcher.parallel.watch import Watch


def cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Autocast does nothing on meta tensors, so this one call runs on zeros in memory."""
    given = tensors((args, kwargs))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
        out = func(*args, **kwargs)
    return _returned(out, given, made)


def _returned(out: Any, given: list[torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    """``out`` of stand-ins, on meta again; what is one of the ``given`` is that, and gradients reach all of them."""
    back = {id(made[id(t)]): t for t in given}
    fresh = {id(t): t for t in tensors(out) if id(t) not in back}
    specs = [(t.shape, t.dtype, t.requires_grad) for t in fresh.values()]
    with torch.device("meta"):
        metas = _Opaque.apply(specs, torch.empty((), requires_grad=True), *given)  # type: ignore[no-untyped-call]
    back |= dict(zip(fresh, metas, strict=True))
    return mapped(out, lambda t: back[id(t)])


class _Opaque(torch.autograd.Function):
    """Meta tensors for what something has returned that ran elsewhere."""

    @staticmethod
    def forward(ctx: Any, specs: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(out, specs, strict=True) if not grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a plan has no backward")


def _zeros(t: torch.Tensor) -> torch.Tensor:
    """In memory, and no leaf of autograd where ``t`` has a gradient: it may be changed in place."""
    out = torch.zeros_like(t, device="cpu")
    return out.requires_grad_().clone() if t.requires_grad else out


def call(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    meter: Meter | None = None,
    watch: Watch | None = None,
    really: bool = False,
) -> Any:
    """Run a module on meta tensors; one whose Python looks at the data runs on zeros in memory, alone, instead.

    Then ``meter`` and ``watch`` forget what they saw of the first try. ``really``: on zeros without trying.
    """
    if not really:
        undo = [seen.mark() for seen in (meter, watch) if seen is not None]
        try:
            return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as refused:
            if not looks(refused):
                raise
        for back in undo:
            back()
    with torch._C.DisableTorchFunction():  # to copy a weight is not to use it
        real = zeros(copied(module))
    if watch is not None:
        watch.copied(module, real)
    own = dict(zip(_storages(real), _storages(module), strict=True))
    if meter is not None:
        meter.own((*real.parameters(), *real.buffers()))
    given = tensors((args, kwargs))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        own |= {made[id(t)].untyped_storage()._cdata: t.untyped_storage()._cdata for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        since, before = (len(watch.order), watch.effects.changed) if watch is not None else (0, 0)
        with ExitStack() as seen:
            if watch is not None:
                seen.enter_context(watch.counting(module, real))
                seen.enter_context(watch.looking())
            out = real(*args, **kwargs)
        if watch is not None and watch.effects.changed > before:
            _again(real, args, kwargs, meter, watch)
        if watch is not None and watch.units_below():
            watch.steers |= _steers(real, args, kwargs, meter, watch, since)
    if meter is not None:
        meter.written.update([own[w] for w in meter.written if w in own])
    return _returned(out, given, made)


def _storages(module: nn.Module) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())]


def _again(real: nn.Module, args: Any, kwargs: Any, meter: Meter | None, watch: Watch) -> None:
    """It may look at what it has changed, and change other things then: of this run those alone are kept."""
    undo = [watch.mark(effects=False), *([meter.mark()] if meter is not None else [])]
    real(*args, **kwargs)
    for back in undo:
        back()


TRIES = 3


def _steers(real: nn.Module, args: Any, kwargs: Any, meter: Meter | None, watch: Watch, since: int) -> bool:
    """Whether other numbers make other units run, or in another order; tried with a few, nothing of which is kept."""
    g, was = torch.Generator().manual_seed(0), watch.ran(since)
    undo = [seen.mark() for seen in (meter, watch) if seen is not None]

    def noise(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=g).to(t.dtype) if t.is_floating_point() else t

    found = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for _ in range(TRIES):
            for p in real.parameters():
                p.copy_(noise(p))
            now = len(watch.order)
            try:
                real(*mapped(args, noise), **mapped(kwargs, noise))
            except Exception:  # it does not take any numbers: then who knows
                found = True
            found |= watch.ran(now) != was
    for back in undo:
        back()
    return found


def looks(error: BaseException | None) -> bool:
    """Whether it says that Python looked at the data of a tensor that has none."""
    return isinstance(error, RuntimeError | NotImplementedError) and "meta" in str(error).lower()


def zeros(module: nn.Module) -> nn.Module:
    """``module`` itself, its tensors now zeros in memory; what was one tensor under several names still is."""
    made: dict[int, Any] = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.zeros_like(p, device="cpu"), p.requires_grad)
                owner._parameters[name] = made[id(p)]
        for name, b in owner._buffers.items():
            if b is not None:
                owner._buffers[name] = made.setdefault(id(b), torch.zeros_like(b, device="cpu"))
    return module
