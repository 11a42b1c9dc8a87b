"""Warnings of torch while it compiles; where warnings are errors, they would stop it."""

from __future__ import annotations

TRACING = (
    "ignore:The .grad attribute of a Tensor",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:Dynamo does not know how to trace",
)
