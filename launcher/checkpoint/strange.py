"""Says how the names of incoming tensors and those of a model differ, with the way out."""

from __future__ import annotations

from collections.abc import Collection

from launcher.checkpoint.names import renamed
from launcher.checkpoint.strategy import Strategy
from launcher.checkpoint.tables import FROM_LLAMA

SHOWN = 6


def strange(names: Collection[str], target: Strategy) -> str:
    """What ``names`` has and lacks of ``target``, where a tied tensor may come under any name; "" when they fit."""
    unknown = [n for n in names if n not in target.named]
    missing = [n for n, e in target.entries.items() if not {n, *e.aliases} & {*names}]
    if not unknown and not missing:
        return ""
    told = [
        *([f"the model has no place for {_few(unknown)}"] if unknown else []),
        *([f"nothing is there for the model's {_few(missing)}"] if missing else []),
    ]
    return "; ".join(told) + _cure(names, unknown, missing, target)


def _cure(names: Collection[str], unknown: Collection[str], missing: Collection[str], target: Strategy) -> str:
    if {*renamed(names, FROM_LLAMA, strict=False).names.values()} & {*missing}:
        return "; these are a Llama's names as transformers has them: names: llama"
    if unknown and missing:
        return "; names is a table {theirs: ours} that brings them together"
    if missing:
        return "; the sizes of the model must be those of the source"
    return "; leave them out with null in the table names, or all with strict: false"


def _few(names: Collection[str]) -> str:
    first = ", ".join([*names][:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"
