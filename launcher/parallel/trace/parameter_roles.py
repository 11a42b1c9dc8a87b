"""Roles of parameters: embedding, head, adapter."""

from __future__ import annotations

from torch import nn

from launcher.parallel.trace.module_kinds import ADAPTER, adapted
from launcher.plan.values.model_graph import Role


def param_roles(model: nn.Module) -> dict[int, Role]:
    """Returns the roles of parameters by identity; a tied head is an embedding."""
    modules = dict(model.named_modules())
    lists = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.ModuleDict))
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [m for n, m in modules.items() if isinstance(m, nn.Linear) and not n.startswith(lists)]
    roles: dict[int, Role] = {id(p): "head" for m in linear[-1:] for p in m.parameters(recurse=False)}
    roles |= {id(p): "embedding" for m in tables for p in m.parameters(recurse=False)}
    beside = [m._parameters[n] for m in modules.values() if adapted(m) for n in ADAPTER]
    return roles | {id(p): "adapter" for p in beside}
