"""What parameters are to a model: tables of embeddings, the head, adapters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from launcher.plan.values.facts import Role

ADAPTER = ("lora_A", "lora_B")


def param_roles(model: nn.Module) -> dict[int, Role]:
    """Of parameters, by identity: what is both is an embedding."""
    modules = dict(model.named_modules())
    lists = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.ModuleDict))
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [m for n, m in modules.items() if isinstance(m, nn.Linear) and not n.startswith(lists)]
    roles: dict[int, Role] = {id(p): "head" for m in linear[-1:] for p in m.parameters(recurse=False)}
    roles |= {id(p): "embedding" for m in tables for p in m.parameters(recurse=False)}
    beside = [m._parameters[n] for m in modules.values() if adapted(m) for n in ADAPTER]
    return roles | {id(p): "adapter" for p in beside}


def adapted(module: nn.Module) -> bool:
    """Whether it is linear, and has an adapter beside it."""
    return isinstance(module, nn.Linear) and module._parameters.keys() >= {*ADAPTER}


def adds(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Of an adapter of ``model.lora``: what it adds, given the input and its two factors, whole or pieces.

    ``None`` of a class of the user's own, which may do anything with them.
    """
    found: Callable[[Tensor, Tensor, Tensor], Tensor] | None = getattr(module, "launcher_lora", None)
    return found if adapted(module) else None
