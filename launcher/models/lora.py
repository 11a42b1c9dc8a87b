"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of linear modules of any model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.errors import Problem, RequestError
from launcher.job.schema.models import Lora
from launcher.plan.values.module_names import is_glob, matches

KEY = "model.lora.modules"


class AdaptedLinear(nn.Linear):
    """Adds ``scale`` times ``lora_B`` times ``lora_A`` to ``base``; the product is zero at first.

    It has the same weights as ``base``, under the same names.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        dtype, device = base.weight.dtype, base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=sqrt(5))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.launcher_lora(x, self.lora_A, self.lora_B)

    def launcher_lora(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns what the adapter of ``a`` and ``b`` adds.

        Sharding recognizes the method by this name.
        """
        return self.scale * F.linear(F.linear(x, a), b)


def adapt(model: nn.Module, lora: Lora) -> nn.Module:
    """Replaces linear modules of ``model`` in place by adapted ones; nothing but the adapters is trained.

    Raises ``RequestError``.
    """
    named = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    requested = (lora.modules,) if isinstance(lora.modules, str) else lora.modules
    keys = tuple(_anywhere(key, named) for key in requested)
    layers = {n: m for n, m in named.items() if isinstance(m, nn.Linear) and any(matches(k, n) for k in keys)}
    problems = [*_unknown(keys, named, layers), *_odd(layers)]
    if problems:
        raise RequestError(tuple(problems))

    model.requires_grad_(False)
    made: dict[nn.Module, AdaptedLinear] = {}
    for name, base in layers.items():
        if base not in made:
            made[base] = AdaptedLinear(base, lora.rank, lora.alpha / lora.rank)
        owner, _, attr = name.rpartition(".")
        setattr(model.get_submodule(owner), attr, made[base])
    return model


def _anywhere(key: str, named: Collection[str]) -> str:
    """Returns ``key``, or a glob if it is only the end of names, as allowed in PEFT's ``target_modules``."""
    ends = any(n.endswith(f".{key}") for n in named)
    return f"*.{key}" if ends and not is_glob(key) and key not in named else key


def _unknown(
    keys: tuple[str, ...], named: dict[str, nn.Module], layers: dict[str, nn.Linear]
) -> Iterator[Problem]:
    linear = [n for n, m in named.items() if isinstance(m, nn.Linear)]
    existing = f"linear modules: {', '.join(linear[:6])}{' ..' if len(linear) > 6 else ''}"
    for key in keys:
        if not any(matches(key, n) for n in layers):
            yield Problem(
                KEY, f"{key}: it names no linear module; {existing if linear else 'the model has none'}"
            )


def _odd(layers: dict[str, nn.Linear]) -> Iterator[Problem]:
    """Yields a problem for each module that is more than a linear layer: what it adds would be lost."""
    for name, m in layers.items():
        own = {k for k, p in m._parameters.items() if p is not None} - {"weight", "bias"}
        own |= {*m._modules, *m._buffers}
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        if type(m).forward is not nn.Linear.forward or "forward" in vars(m) or own:
            yield Problem(
                KEY, f"{name}: {type(m).__name__} does more than a linear module; remove it from the list"
            )
        elif any(hooks):
            yield Problem(KEY, f"{name}: it has hooks, which would be lost; remove it from the list")
