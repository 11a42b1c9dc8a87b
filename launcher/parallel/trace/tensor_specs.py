"""Shapes and dtypes of what a forward takes and returns, and its description in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launcher.plan.values.tensor_spec import TensorSpec

Specs = tuple[TensorSpec, ...] | None
"""``None`` for a value that is neither a tensor nor several."""
_MOST = 6
"""Most entries of a collection in a message."""


def spec(t: torch.Tensor) -> TensorSpec:
    """Returns shape and dtype of ``t``: of the full tensor for a DTensor, of its values for a nested one."""
    values = t.values() if t.is_nested else t
    return TensorSpec(tuple(values.shape), str(t.dtype).removeprefix("torch."))


def specs(value: Any) -> tuple[Specs, bool]:
    """Returns the specs of a module's or function's result, and whether it is several tensors in one."""
    if _is_tensor(value):
        return (spec(value),), False
    if isinstance(value, tuple | list) and value and all(map(_is_tensor, value)):
        return tuple(map(spec, value)), True
    return None, False


def is_sparse(t: torch.Tensor) -> bool:
    """Returns true if ``t`` has a sparse layout, such as COO or CSR."""
    return not t.is_nested and t.layout is not torch.strided


def memory_dims(value: Any) -> tuple[tuple[int, ...], ...]:
    """Returns for each tensor of ``specs`` its dimensions in the order of its memory; () if none needs it.

    A tensor that is contiguous, or has gaps or overlaps, needs none.
    """
    tensors = [value] if _is_tensor(value) else value if specs(value)[1] else []
    out = tuple(map(dims_of, tensors))
    return out if any(out) else ()


def dims_of(t: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions of ``t`` in the order of its memory; () if it is contiguous or has gaps."""
    if t.layout is not torch.strided or t.is_contiguous():
        return ()
    dims = tuple(sorted(range(t.dim()), key=t.stride, reverse=True))
    return dims if t.permute(dims).is_contiguous() else ()


def _is_tensor(value: Any) -> bool:
    """Returns true for a tensor of one shape; a nested tensor has a shape for each sample."""
    return isinstance(value, torch.Tensor) and not value.is_nested


def output_specs(value: Any) -> tuple[Specs, bool, tuple[str | int, ...]]:
    """Returns the specs of a full model's result, and the key of each if there are several.

    Several tensors must be in a plain tuple, list or dict: a loss would get a named tuple without its names.
    For a result that no loss can take, the keys are its description and the Python text that selects its
    first tensor.
    """
    if type(value) is dict and all(isinstance(key, str) for key in value):
        tensor_specs, packed = specs([*value.values()])
        keys: tuple[str | int, ...] = tuple(value)
    else:
        tensor_specs, packed = specs(value)
        keys = tuple(range(len(value))) if packed else ()
        if packed and type(value) not in (tuple, list):
            tensor_specs = None
    if tensor_specs is None:
        return None, False, (returned(value), tensor_inside(value))
    return tensor_specs, packed, keys if packed else ()


def returned(value: Any, deep: int = 3) -> str:
    """Describes a forward's result, for a message.

    >>> returned((torch.zeros(1), None)), returned({"logits": [torch.zeros(1)], "n": 3})
    ('(Tensor, None)', "{'logits': [Tensor], 'n': int}")
    """
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else "Tensor"
    if not isinstance(value, Mapping | tuple | list) or not deep:
        return kind
    pairs = _named(value)
    inner = [f"{name}{returned(v, deep - 1)}" for name, v in pairs[:_MOST]] + ["..."] * (len(pairs) > _MOST)
    text = ", ".join(inner)
    if type(value) is tuple:
        return f"({text},)" if len(pairs) == 1 else f"({text})"
    if type(value) in (list, dict):
        return f"[{text}]" if type(value) is list else f"{{{text}}}"
    return f"{kind}({text})"


def tensor_inside(value: Any) -> str:
    """Returns the Python text that selects the first tensor of a forward's result.

    It is "" if the result has no tensor, or is itself a plain tensor.
    """
    if isinstance(value, torch.Tensor):
        return ".values()" if value.is_nested else ""
    if isinstance(value, Mapping):
        places = [(f"[{name!r}]" if type(value) is dict else f".{name}", v) for name, v in value.items()]
    elif hasattr(value, "_fields"):
        places = [(f".{name}", getattr(value, name)) for name in value._fields]
    elif isinstance(value, tuple | list):
        places = [(f"[{n}]", v) for n, v in enumerate(value)]
    else:
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        places = [(f".{name}", v) for name, v in attributes.items()]
    return next((place for place, v in places if isinstance(v, torch.Tensor)), "")


def _named(value: Any) -> list[tuple[str, Any]]:
    """Returns the entries of a collection, each with the text in front of it."""
    if isinstance(value, Mapping):
        return [(f"{k!r}: " if type(value) is dict else f"{k}=", v) for k, v in value.items()]
    if hasattr(value, "_fields"):
        return [(f"{k}=", getattr(value, k)) for k in value._fields]
    return [("", v) for v in value]


def dtype_of(name: str) -> torch.dtype:
    """Converts ``"float32"`` to ``torch.float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def meta(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Returns meta tensors of these shapes."""
    return [torch.empty(s.shape, dtype=dtype_of(s.dtype), device="meta") for s in specs]
