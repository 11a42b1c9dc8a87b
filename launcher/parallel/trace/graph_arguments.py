"""Decides which Python objects can be written into a graph as they are, and why others cannot."""

from __future__ import annotations

from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.parallel.dispatch.containers import NamedFunction
from launcher.parallel.dispatch.pytree import tree_leaves, tree_map_only


def on_meta(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with meta in place of the CPU, which tensors report; lists stay the same."""
    if not any(isinstance(d, torch.device | str) for d in tree_leaves((args, kwargs))):
        return args, kwargs
    swap = lambda d: torch.device("meta") if d.type == "cpu" else d  # noqa: E731
    args, kwargs = tree_map_only(torch.device, swap, (args, dict(kwargs)))
    if kwargs.get("device") == "cpu":
        kwargs["device"] = "meta"
    return args, kwargs


def writable_name(target: Any) -> Any:
    """Return ``target``, under a name that fx can write into code."""
    if isinstance(target, str | NamedFunction) or target is getitem:
        return target
    if target.__name__ in ("__get__", "__set__"):
        verb = getattr if target.__name__ == "__get__" else setattr
        attribute = target.__self__.__name__
        return NamedFunction(lambda t, *rest: verb(t, attribute, *rest), f"{verb.__name__}_{attribute}")
    name = getattr(target, "__name__", "call").replace("<", "").replace(">", "")
    return NamedFunction(target, name.strip("_") if name.startswith("__") else name)


def why_foreign(t: torch.Tensor) -> str:
    """Return why a tensor that belongs to neither the model nor the trace cannot be used."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "it calls torch.func (vmap, grad), whose tensors are nowhere else"
    if isinstance(t, nn.Parameter):
        text = "it uses a parameter of another copy of the model"
        return f"{text}, as a function does that __init__ has made around self"
    return "it uses a tensor that was not created there and is neither a parameter nor a buffer of the model"


def is_frozen(a: Any) -> bool:
    """Whether the object is immutable."""
    made: Any = getattr(type(a), "__dataclass_params__", None)
    return isinstance(a, frozenset | np.dtype | type) or (made is not None and made.frozen)


def captured_state(func: Any) -> str:
    """Describe an object in a function that would differ between stages; "" for none."""
    # closures, methods, partials and defaults
    cells = [c.cell_contents for c in getattr(func, "__closure__", None) or () if not _empty(c)]
    bound = [*cells, getattr(func, "__self__", None), *getattr(func, "args", ()), getattr(func, "func", None)]
    bound += (getattr(func, "keywords", None) or {}).values()
    bound += getattr(func, "__defaults__", None) or ()

    for value in bound:
        for some in value if isinstance(value, list | tuple) else (value,):
            if isinstance(some, torch.Tensor):
                return "a tensor"
            if isinstance(some, nn.Module):
                return f"the module {type(some).__name__}"
            found = captured_state(some) if callable(some) and not isinstance(some, type) else ""
            if found:
                return found
    return ""


def _empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
