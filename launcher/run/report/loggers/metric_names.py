"""Names of a row's figures, and of settings, in a logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEFT_OUT = ("step", "steps")


def tag(key: str) -> str:
    """
    >>> tag("loss"), tag("val_loss"), tag("val_accuracy_ema")
    ('train/loss', 'val/loss', 'val/accuracy_ema')
    """
    return f"val/{key.removeprefix('val_')}" if key.startswith("val_") else f"train/{key}"


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by their names in a logger.

    >>> figures({"step": 3, "steps": 9, "loss": 1.5, "val_loss": None})
    {'train/loss': 1.5}
    """
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in LEFT_OUT}
    return {tag(key): float(value) for key, value in numbers.items()}


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings by dotted key; an empty group is a value.

    >>> flat({"model": {"name": "lm", "lora": None}, "steps": {}})
    {'model.name': 'lm', 'model.lora': None, 'steps': {}}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        found |= flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return found
