"""The model as its author wrote it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from launcher.job.schema.job import Job
from launcher.models.build import build_model

KEPT = {"fp64": torch.float64}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of weights, gradients and optimizer state in a run of this ``precision``."""
    return KEPT.get(precision, torch.float32)


def construct(job: Job, seed: int) -> nn.Module:
    """Returns ``Model()`` in training mode; torch, ``random`` and numpy are seeded with ``seed`` first.

    So values that it draws from any of them differ for other seeds. Restores all random states.
    """
    default = torch.get_default_dtype()
    with _streams():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_default_dtype(weight_dtype(job.train.precision))
        try:
            model = build_model(job.model, job.security.allow)
            model.train()  # whatever mode its constructor left it in
            return model
        finally:
            torch.set_default_dtype(default)


@contextmanager
def _streams() -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter, buffer and tensor in a plain attribute of a module, by its first name."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{path}.{name}".lstrip(".")] = value
    return tensors


def names(model: nn.Module) -> list[frozenset[str]]:
    """Returns all names of each parameter and buffer."""
    by_id: dict[int, set[str]] = {}
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, t in (pair for named in tensors for pair in named):
        by_id.setdefault(id(t), set()).add(name)
    return [frozenset(same) for same in by_id.values()]


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a checkpoint contains, by first name."""
    lost = {
        id(b) for m in model.modules() for n, b in m._buffers.items() if n in m._non_persistent_buffers_set
    }  # fmt: skip
    return {n: b for n, b in model.named_buffers() if id(b) not in lost}


def means_over_samples(model: nn.Module) -> set[str]:
    """Returns the statistics of torch's InstanceNorm, by first name: a batch in parts has their mean."""
    kind = nn.modules.instancenorm._InstanceNorm
    norms = {
        n: m for n, m in model.named_modules() if isinstance(m, kind) and type(m).forward is kind.forward
    }
    every = {f"{name}.{attr}" for name in norms for attr in ("running_mean", "running_var")}
    return every & {*persistent(model)}


@torch.no_grad()
def put(model: nn.Module, numbers: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Moves ``model`` to ``device`` and sets the tensors named in ``numbers``, by any of their names."""
    move(model, device)
    for path, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            full = f"{path}.{name}".lstrip(".")
            if isinstance(value, Tensor) and full in numbers:
                value.copy_(numbers[full])
    return model


def move(model: nn.Module, device: torch.device) -> None:
    """Moves every tensor of ``model`` to ``device``; keeps tensors shared between names shared.

    ``Module.to`` makes a new buffer for each name. It does the same for a parameter if a tensor on the device
    cannot replace the one on the CPU.
    """
    before: dict[int, Tensor] = {}
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        kinds: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for owner in kinds:
            for name, value in owner.items():
                if isinstance(value, Tensor):
                    before[id(value)] = value  # kept alive, so that no other tensor gets its id
                    places.setdefault(id(value), []).append((owner, name))

    model.to(device)
    for key, same in places.items():
        registered = [(owner, name) for owner, name in same if owner[name] is not before[key]]
        owner, name = (registered or same)[0]
        moved = owner[name].to(device)
        for owner, name in same:
            owner[name] = moved


def in_dtypes_of_run(
    made: Mapping[str, Tensor], plain: Mapping[str, Tensor], precision: str
) -> dict[str, Tensor]:
    """Returns ``plain`` in the dtypes of a run: frozen parameters are in half precision as in ``made``."""
    low = LOW.get(precision)
    frozen = {n for n, t in plain.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    half = {n for n in frozen if low is not None and n in made and made[n].dtype == low}
    return {n: t.detach().to(low) if n in half else t for n, t in plain.items()}


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Returns a copy of ``model`` that shares only its trainable parameters.

    A forward may change frozen parameters, such as those of a teacher. Each rank changes its own copy.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if p.requires_grad})


def share(model: nn.Module, weights: nn.Module) -> nn.Module:
    """Gives ``model`` the trainable parameters of ``weights``, and returns it."""
    for path, module in weights.named_modules():
        for name, p in module._parameters.items():
            if p is None or not p.requires_grad:
                continue
            model.get_submodule(path)._parameters[name] = p
    return model


def forward_function(model: nn.Module, precision: str) -> Callable[..., Any]:
    """Returns a function that runs ``model``; in half precision it casts the weights in every call.

    Parameters of modules with running statistics are not cast.
    """
    if precision not in LOW:
        return model
    beside = [m for m in model.modules() if any(b.is_floating_point() for b in persistent_of(m))]
    wide = {id(p) for m in beside for p in m._parameters.values()}
    low = LOW[precision]

    def cast(p: Tensor) -> Tensor:
        return p.to(low) if p.is_floating_point() and id(p) not in wide else p

    def run(*xs: Any) -> Any:
        return functional_call(model, {n: cast(p) for n, p in model.named_parameters()}, xs)

    return run


def persistent_of(module: nn.Module) -> list[Tensor]:
    """Returns the buffers of ``module`` itself that a checkpoint contains."""
    return [
        b for n, b in module._buffers.items() if b is not None and n not in module._non_persistent_buffers_set
    ]
