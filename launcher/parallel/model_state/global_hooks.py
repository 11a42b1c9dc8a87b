"""Finds hooks that a constructor registers for all modules of torch, and removes them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module

KINDS: dict[str, tuple[str, ...]] = {
    "register_module_buffer_registration_hook": ("_global_buffer_registration_hooks",),
    "register_module_module_registration_hook": ("_global_module_registration_hooks",),
    "register_module_parameter_registration_hook": ("_global_parameter_registration_hooks",),
    "register_module_forward_pre_hook": ("_global_forward_pre_hooks",),
    "register_module_forward_hook": (
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
    ),
    "register_module_full_backward_pre_hook": ("_global_backward_pre_hooks",),
    "register_module_full_backward_hook": ("_global_backward_hooks",),
}
"""The functions that register global hooks, and torch's tables of what each has registered."""


@contextmanager
def hooked_for_all() -> Iterator[list[str]]:
    """Yield a list that has, on exit, the functions that were called; their hooks are removed."""
    stores: dict[str, list[dict[int, Any]]] = {
        name: [vars(module)[kept] for kept in kinds] for name, kinds in KINDS.items()
    }
    before = {id(store): set(store) for each in stores.values() for store in each}
    called: list[str] = []
    try:
        yield called
    finally:
        for name, each in stores.items():
            new = [(store, key) for store in each for key in store.keys() - before[id(store)]]
            if new:
                called.append(name)
            for store, key in new:
                del store[key]
