"""Converts an optimizer's state of one parameter to named tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.optim.sharded import LocalShards
from launcher.plan.values.dtypes import ITEMSIZE

DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
NUMBERS: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "none": lambda _: None}
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple}
GROUP = "param_group"


def pack(optimizer: torch.optim.Optimizer, p: Tensor, counters: Iterable[str] = ()) -> dict[str, Tensor]:
    """Returns the state of a parameter as tensors by name.

    Tensors are returned as they are and share memory with the state. Python's numbers, ``None``, lists and
    tuples become tensors without dims, whose names end in their type: ``step/int``, ``history/list`` (its
    length) and ``history/0/float``.

    ``counters`` names values of the parameter's group that belong to the state too: ``param_group/k/int``.
    Values of other types are left out: ``unpackable`` names them.
    """
    return {
        name: t
        for key, value in _entries(optimizer, p, counters)
        if not _unstorable(key, value)
        for name, t in _leaves(key, value)
    }


def unpackable(optimizer: torch.optim.Optimizer, p: Tensor, counters: Iterable[str] = ()) -> list[str]:
    """Returns ``key of type type`` of each value that ``pack`` leaves out."""
    return [
        f"{key} of type {kind}"
        for key, value in _entries(optimizer, p, counters)
        if (kind := _unstorable(key, value))
    ]


def unpack(optimizer: torch.optim.Optimizer, p: Tensor, packed: Mapping[str, Tensor]) -> None:
    """Restores the state of ``p``, and the values of its group, from ``packed``, which ``pack`` returned."""
    at = _own(optimizer, p)
    state = _nested(packed)
    group = _group(optimizer, at)
    for key, value in state.pop(GROUP, {}).items():
        group[key] = _value(value)
    optimizer.state.pop(at, None)
    if state:
        optimizer.state[at] = {key: _value(value) for key, value in state.items()}


def on_device(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    """Returns true if step counters are on the device of ``p``, as in torch's fused and capturable steps."""
    group = _group(optimizer, _own(optimizer, p))
    return bool(group.get("capturable") or group.get("fused"))


def _own(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """Returns the tensor under which the optimizer knows ``p``."""
    return optimizer.own(p) if isinstance(optimizer, LocalShards) else p


def _group(optimizer: torch.optim.Optimizer, at: Tensor) -> dict[str, Any]:
    return next((g for g in optimizer.param_groups if any(at is q for q in g["params"])), {})


def _entries(
    optimizer: torch.optim.Optimizer, p: Tensor, counters: Iterable[str]
) -> Iterator[tuple[Any, Any]]:
    at = _own(optimizer, p)
    state = optimizer.state.get(at, {})
    yield from state.items() if isinstance(state, Mapping) else [(type(state), state)]
    group = _group(optimizer, at)
    yield from ((f"{GROUP}/{key}", group[key]) for key in counters if key in group)


def _unstorable(key: Any, value: Any) -> str:
    """Returns the type of a value that checkpoints cannot store, or "".

    A key becomes part of a tensor's name in the checkpoint.
    """
    if not isinstance(key, str) or not key.removeprefix(f"{GROUP}/").isidentifier() or key == GROUP:
        return f"{type(value).__name__}, under a key that is not a plain name"
    if type(value) in (list, tuple):
        return next(filter(None, (_unstorable(key, one) for one in value)), "")
    if isinstance(value, Tensor):
        kind = f"{type(value).__name__} ({value.layout}, {value.dtype})".replace("torch.", "")
        return "" if _plain(value) else kind

    # Python's own types; an int must fit an int64
    fits = type(value) is int and -(2**63) <= value < 2**63
    return "" if fits or value is None or type(value) in (bool, float) else type(value).__name__


def _plain(t: Tensor) -> bool:
    known = str(t.dtype).removeprefix("torch.") in ITEMSIZE
    return type(t) in (Tensor, nn.Parameter, DTensor) and t.layout is torch.strided and known


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        yield name, value
    elif value is None:
        yield f"{name}/none", torch.zeros((), dtype=torch.bool)
    elif kind in SEQUENCES:
        yield f"{name}/{kind}", torch.tensor(len(value))
        for i, one in enumerate(value):
            yield from _leaves(f"{name}/{i}", one)
    else:
        yield f"{name}/{kind}", torch.tensor(value, dtype=DTYPES[type(value)])


def _nested(packed: Mapping[str, Tensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, t in packed.items():
        *path, last = name.split("/")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = t
    return out


def _value(packed: Any) -> Any:
    if isinstance(packed, Tensor):
        return packed
    for kind, made in SEQUENCES.items():
        if kind in packed:
            return made(_value(packed[str(i)]) for i in range(int(packed[kind].item())))
    ((kind, t),) = packed.items()
    return NUMBERS[kind](t.item())
