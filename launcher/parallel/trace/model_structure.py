"""The modules, parameters and ties of a model, and its traits that a plan depends on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import copied, hooks
from launcher.parallel.trace.module_kinds import is_mean_over_samples, kind_of
from launcher.parallel.trace.parameter_roles import param_roles
from launcher.parallel.trace.tensor_specs import spec
from launcher.plan.values.model_graph import ModelStructure, ModelTraits, Param

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def skeleton(model: nn.Module) -> ModelStructure:
    """Returns modules in definition order, and parameters and persistent buffers under each name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            text = f"{name or 'the model'} is a TorchScript module, whose tensors cannot be placed on ranks"
            raise RequestError((Problem("model", f"{text}; use the class that it was compiled from"),))

    _complete(model)

    # parameters and persistent buffers
    first: dict[int, str] = {}
    params = []
    persistent = {
        f"{name}.{b}".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        for b in module._buffers
        if b not in module._non_persistent_buffers_set
    }

    # each with the first of its names
    roles = param_roles(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        role = roles.get(id(p), "")
        params.append(Param(name, spec(p), first.setdefault(id(p), name), p.requires_grad, role=role))
    for name, b in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            params.append(Param(name, spec(b), first.setdefault(id(b), name), trainable=False, buffer=True))

    # modules, and which of them tensor parallelism can split
    modules = tuple(n for n, _ in model.named_modules(remove_duplicate=False) if n)
    boxes = frozenset(n for n, m in model.named_modules() if isinstance(m, CONTAINERS))
    lists = frozenset(n for n, m in model.named_modules() if type(m).forward is nn.Module.forward)
    kinds = [(n, kind_of(m)) for n, m in model.named_modules(remove_duplicate=False) if n]
    return ModelStructure(
        modules=modules,
        params=tuple(params),
        containers=boxes,
        kinds=tuple((n, kind) for n, kind in kinds if kind),
        traits=_traits(model),
        lists=lists,
    )


def _complete(model: nn.Module) -> None:
    """Raises ``RequestError`` if a module overrides a method such as ``parameters`` and it lists too little.

    A plain loop trains, clips or moves only what that method lists, but a plan places everything that torch's
    own method would list.
    """
    modules = _below(model)
    params = {id(p) for m in modules for p in m._parameters.values() if p is not None}
    buffers = {id(b) for m in modules for b in m._buffers.values() if b is not None}
    for module in modules:
        for name in ("named_modules", "modules"):
            _listed(module, name, partial(_ids_below, module), "modules")
    for name in ("named_parameters", "parameters"):
        _listed(model, name, lambda: params, "parameters")
    for name in ("named_buffers", "buffers"):
        _listed(model, name, lambda: buffers, "buffers")


def _listed(module: nn.Module, name: str, own: Callable[[], set[int]], what: str) -> None:
    """Raises ``RequestError`` unless the method ``name`` of ``module`` lists exactly what ``own`` returns."""
    method = getattr(module, name)
    if getattr(method, "__func__", method) is getattr(nn.Module, name):
        return
    listed, has = {id(v[1] if isinstance(v, tuple) else v) for v in method()}, own()
    if listed != has:
        text = f"{type(module).__name__}.{name}() lists {len(listed & has)} of its {len(has)} {what}"
        text += ", but the launcher uses all that torch itself would list"
        cure = "let it list all, and set requires_grad_(False) on parameters that are not to be trained"
        raise RequestError((Problem("model", f"{text}; {cure}"),))


def _ids_below(module: nn.Module) -> set[int]:
    return {id(m) for m in _below(module)}


def _below(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all below it, each once."""
    seen: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        now = waiting.pop()
        if id(now) not in seen:
            seen[id(now)] = now
            waiting += [m for m in now._modules.values() if m is not None]
    return list(seen.values())


def _traits(model: nn.Module) -> ModelTraits:
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    modules = tuple(model.named_modules())
    return ModelTraits(
        hooked=tuple(n for n, p in model.named_parameters() if hooks(p)),
        backward=tuple(n for n, m in modules if m._backward_hooks or m._backward_pre_hooks),
        synced=tuple(n for n, m in modules if isinstance(m, nn.SyncBatchNorm)),
        compiled=tuple(n for n, m in modules if _compiled(m)),
        several_names=tuple(tuple(same) for same in names.values() if len(same) > 1),
        batch_norms=tuple(n for n, m in modules if _over_samples(m)),
        instance_norms=tuple(n for n, m in modules if is_mean_over_samples(m, "running_mean")),
        extra_states=tuple(n for n, m in modules if type(m).get_extra_state is not nn.Module.get_extra_state),
        fused=_fused(model),
    )


def _fused(model: nn.Module) -> tuple[str, ...]:
    """Returns the tensors that ``eval()`` computes from weights, as in a module that fuses its branches."""
    kinds = {type(m) for m in model.modules()}
    if all(k.train is nn.Module.train and k.eval is nn.Module.eval for k in kinds):
        return ()
    trial = copied(model)
    before = _tensor_names(trial)
    with suppress(Exception), _WeightUses() as uses:  # another check reports a model that cannot be evaluated
        trial.eval()
    return tuple(sorted(_tensor_names(trial) - before)) if uses.seen else ()


def _tensor_names(model: nn.Module) -> set[str]:
    """Returns the names of all tensors of modules, also of those in plain attributes."""
    names = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        names |= {f"{path}.{n}".lstrip(".") for n, v in vars(module).items() if isinstance(v, Tensor)}
    return names


class _WeightUses(TorchFunctionMode):
    """Notes whether torch computes with a parameter."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= isinstance(out, Tensor) and any(isinstance(t, nn.Parameter) for t in args)
        return out


def _over_samples(module: nn.Module) -> bool:
    """Returns true if ``module`` normalizes over a batch; a module kept in evaluation mode does not."""
    known = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return known and (module.training or module.running_mean is None)


def _compiled(module: nn.Module) -> bool:
    """Returns true if the model has compiled ``module``. Compares class names: an import is slow."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
