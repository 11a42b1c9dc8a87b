"""Builds the optimizer and its parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.errors import Problem, RequestError
from launcher.job.schema.components import Optim
from launcher.job.schema.optim import SGD, Adafactor, AdamW, Lion, Momentum, Muon
from launcher.job.schema.user_class import Target
from launcher.optim import adafactor, muon_lion
from launcher.optim.sharded import LocalShards, TensorPieces, alone
from launcher.plan.values.optimizer import ParamGroup

Named = Sequence[tuple[str, nn.Parameter]]
Grouped = Sequence[tuple[ParamGroup, Named]]
"""This rank's parameters by the groups of the plan."""


def groups(grouped: Grouped) -> list[dict[str, Any]]:
    """Returns the groups in torch's form, with names, in order of first appearance.

    All parameters of a group are plain, or DTensors on one mesh: fused and foreach kernels refuse a mixture.
    """
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    settings: dict[Any, dict[str, Any]] = {}
    for i, (group, params) in enumerate(grouped):
        for name, p in params:
            kind = i, p.device_mesh if isinstance(p, DTensor) else None
            kinds.setdefault(kind, []).append((name, p))
            settings[kind] = dict(group.settings)
    return [{"params": named, **settings[kind]} for kind, named in kinds.items()]


def flat(grouped: Grouped) -> list[tuple[str, nn.Parameter]]:
    """Returns the names and parameters of all groups, group after group."""
    return [pair for _, params in grouped for pair in params]


def replaced(grouped: Grouped, tensors: Iterable[nn.Parameter]) -> Grouped:
    """Returns ``grouped`` with ``tensors`` in place of its parameters, in the order of ``flat``."""
    replacements = iter(tensors)
    return [(group, [(name, next(replacements)) for name, _ in params]) for group, params in grouped]


UNGROUPED = (
    "your own class gets its parameters in one list and has no argument groups; groups work with "
    "optim=adafactor, adamw, lion, momentum, muon and sgd"
)
IDLE = ParamGroup("", (), ("nothing",))


def build_optimizer(
    settings: Optim,
    params: Grouped,
    allow: tuple[str, ...] = (),
    pieces: Mapping[nn.Parameter, TensorPieces] | None = None,
) -> torch.optim.Optimizer:
    """Builds the optimizer of ``params``, this rank's trainable parameters.

    Its steps do nothing if this rank has no trainable parameters. ``pieces`` describes the full tensors of
    split parameters, for updates that depend on the full tensor. Every group keeps its initial rate as
    ``initial_lr``. A user-defined class is called with plain tensors in one list (this rank's pieces of split
    parameters), then with its arguments; it forms its own groups.
    """
    if not params:
        params = [(IDLE, [("nothing", nn.Parameter(torch.empty(0)))])]
    optimizer = _build(settings, params, allow, pieces or {})
    keep_rates(optimizer)
    return optimizer


def keep_rates(optimizer: torch.optim.Optimizer) -> None:
    """Stores each group's rate as ``initial_lr``, which ``scale_lr`` multiplies."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets each group's rate to ``factor`` times its initial rate, and returns that of the first group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # the optimizer may share the tensor, so change it in place
            group["lr"].fill_(group["initial_lr"] * factor)
        else:
            group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _build(
    settings: Optim, params: Grouped, allow: tuple[str, ...], pieces: Mapping[nn.Parameter, TensorPieces]
) -> torch.optim.Optimizer:
    match settings:
        case AdamW(lr=lr, betas=betas, eps=eps):
            return torch.optim.AdamW(groups(params), lr=lr, betas=betas, eps=eps, fused=True)
        case SGD(lr=lr, momentum=momentum, nesterov=nesterov):
            return _sgd(groups(params), lr, momentum, nesterov)
        case Momentum(lr=lr, momentum=momentum):
            return _sgd(groups(params), lr, momentum, nesterov=False)
        case Lion():
            return _on_pieces(partial(_lion, settings, params), params)
        case Adafactor() | Muon():
            return _on_pieces(partial(_full_tensor_optimizer, settings, params, pieces), params)
        case Target():
            return _on_pieces(partial(build_own, settings, allow), params)


def _on_pieces(
    build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], params: Grouped
) -> torch.optim.Optimizer:
    """Builds an optimizer of plain tensors: this rank's pieces of parameters that are split."""
    tensors = [p for _, p in flat(params)]
    return LocalShards(build, tensors) if any(isinstance(p, DTensor) for p in tensors) else build(tensors)


def build_own(
    settings: Target, allow: tuple[str, ...], tensors: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Builds the user's optimizer class. Raises ``RequestError`` if its arguments do not fit."""
    from launcher.job.targets import build, locate

    if "groups" in settings.arguments:
        cls = locate(settings.target, allow, torch.optim.Optimizer, key="optim._target_")
        if "groups" not in inspect.signature(cls).parameters:
            raise RequestError((Problem("optim.groups", f"{settings.target}: {UNGROUPED}"),))
    return build(settings, allow, torch.optim.Optimizer, list(tensors), key="optim._target_")


def _lion(settings: Lion, params: Grouped, tensors: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    param_groups = groups(replaced(params, tensors))
    return muon_lion.Lion(param_groups, settings.lr, settings.betas, settings.weight_decay)


def _full_tensor_optimizer(
    settings: Adafactor | Muon,
    params: Grouped,
    pieces: Mapping[nn.Parameter, TensorPieces],
    tensors: Sequence[nn.Parameter],
) -> torch.optim.Optimizer:
    """Builds an optimizer whose updates depend on full tensors."""
    param_groups = groups(replaced(params, tensors))
    cut = zip(tensors, flat(params), strict=True)
    of = {t: pieces[p] if p in pieces else alone(t) for t, (_, p) in cut}
    if isinstance(settings, Muon):
        return muon_lion.Muon(param_groups, settings, of)
    return adafactor.Adafactor(param_groups, settings.lr, of)


def _sgd(param_groups: list[dict[str, Any]], lr: float, momentum: float, nesterov: bool) -> torch.optim.SGD:
    """Builds SGD with foreach, because its fused kernel has no rule for DTensor."""
    return torch.optim.SGD(param_groups, lr=lr, momentum=momentum, nesterov=nesterov, foreach=True)
