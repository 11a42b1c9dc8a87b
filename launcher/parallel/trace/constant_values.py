"""Computes traced values that depend on no input, no weight and no random number, such as positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from launcher.parallel.dispatch.containers import here

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "alpha_dropout", "empty", "new_empty")
"""Prefixes of functions whose results differ each time."""


class _NotConstant(Exception):
    """Raised if a value depends on an input, a weight or a random number."""


def constant_value(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    """Return the value of ``node`` on the CPU, or ``None``."""
    try:
        return _value(node, done)
    except _NotConstant:
        return None


def _value(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    if node not in done:
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name.startswith(RANDOM) or name == "setitem":
            raise _NotConstant
        args, kwargs = (fx.node.map_arg(a, lambda n: _value(n, done)) for a in (node.args, node.kwargs))
        if node.target is here:
            done[node] = torch.device("cpu")
        else:
            done[node] = node.target(*args, **kwargs)  # type: ignore[operator, arg-type]
    return done[node]
