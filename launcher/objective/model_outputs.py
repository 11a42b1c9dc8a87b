"""Collects and changes the tensors of a model's output, which may be a tuple or a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Output: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def formed(output: Any, keys: Sequence[str | int]) -> Output:
    """Returns tensors in the order of ``keys`` as the model's tuple or dict; without keys, the one tensor."""
    if not keys:
        assert isinstance(output, Tensor)
        return output
    if all(isinstance(key, int) for key in keys):
        return tuple(output)
    return {str(key): t for key, t in zip(keys, output, strict=True)}


def tensors(output: Output) -> tuple[Tensor, ...]:
    if isinstance(output, Tensor):
        return (output,)
    return tuple(output.values()) if isinstance(output, dict) else output


def each(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Returns ``output`` with ``change`` applied to every tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return {key: change(value) for key, value in output.items()}
    return tuple(map(change, output))
