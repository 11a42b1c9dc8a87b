"""Collates the items of torch data sets into batches as torch's ``default_collate`` does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from launcher.data.shuffle import Indices
from launcher.data.source import Source
from launcher.errors import Problem, RequestError, RunError
from launcher.user_errors import user_error

INPUT_KEYS = ("input", "inputs", "x", "image", "pixel_values")
RETURN = "return a tensor, an array or a number"
TARGET_KEYS = ("target", "targets", "y", "label", "labels")
Item = tuple[Any, ...]
"""The inputs in the order of the model's forward, then the target."""


class BadItem(RunError):
    """Raised for a problem with a user's own data set; ``text`` does not contain its name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"data._target_ = {name}: {text}")
        self.name, self.text = name, text


class Items(Source):
    """Reads inputs and targets of the same indices together, and returns each of them once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._read: bytes | None = None
        self._inputs: tuple[Tensor, ...] | None = None
        self._targets: Tensor | None = None

    @abstractmethod
    def items(self, indices: Indices) -> list[tuple[int, Any]]:
        """Returns the items, each with its number in the user's data set. May raise ``BadItem``."""

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        if self._inputs is None or self._read != indices.tobytes():
            self._fetch(indices)
        out, self._inputs = self._inputs, None
        assert out is not None
        return out

    def targets(self, indices: Indices) -> Tensor:
        if self._targets is None or self._read != indices.tobytes():
            self._fetch(indices)
        out, self._targets = self._targets, None
        assert out is not None
        return out

    def _fetch(self, indices: Indices) -> None:
        items = self.items(indices)
        *inputs, self._targets = collated(self.name, items)
        self._read, self._inputs = indices.tobytes(), tuple(inputs)


@contextmanager
def problems() -> Iterator[None]:
    """Reports ``BadItem`` as a problem of the request, for use while planning."""
    try:
        yield
    except BadItem as error:
        raise RequestError((Problem("data._target_", f"{error.name}: {error.text}"),)) from None


def call_user(name: str, item: str, ask: Callable[[], Any]) -> Any:
    """Calls the user's code. Raises ``BadItem`` if it fails."""
    try:
        return ask()
    except RunError:
        raise
    except Exception as error:
        raise BadItem(name, f"{item} cannot be read: {user_error(error)}") from error


def collated(name: str, pairs: Sequence[tuple[int, Any]]) -> list[Tensor]:
    """Collates items into one tensor per part, samples along dim 0. Raises ``BadItem``."""
    items = [_parts(name, number, item) for number, item in pairs]
    try:
        columns = default_collate(items)
    except Exception as error:
        why = _unlike(pairs, items) or _foreign(pairs, items)
        raise BadItem(name, why or f"its items cannot be collated: {user_error(error)}") from error
    for at, column in enumerate(columns):
        if not isinstance(column, Tensor):
            kind = type(items[0][at]).__name__
            text = (
                f"{_part(at, items[0])} of item {pairs[0][0]} has type {kind}, which cannot become a tensor"
            )
            raise BadItem(name, f"{text}; {RETURN}")
        if column.is_meta:
            text = f"{_part(at, items[0])} of item {pairs[0][0]} is on the meta device, without values"
            raise BadItem(name, f"{text}; make it on the CPU")
    return list(columns)


def _parts(name: str, number: int, item: Any) -> Item:
    if isinstance(item, Mapping):
        return _of_keys(name, number, item)
    if isinstance(item, tuple | list) and len(item) > 1:
        return tuple(item)
    of = f" of length {len(item)}" if isinstance(item, tuple | list) else ""
    text = f"item {number} has type {type(item).__name__}{of}"
    raise BadItem(name, f"{text}; return a tuple (input, target), or (inputs..., target)")


def _of_keys(name: str, number: int, item: Mapping[Any, Any]) -> Item:
    """Returns the input and the target of a dictionary item, which must have exactly these two keys."""
    inputs, targets = ([k for k in item if k in known] for known in (INPUT_KEYS, TARGET_KEYS))
    others = [str(k) for k in item if k not in (*INPUT_KEYS, *TARGET_KEYS)]
    if not others and len(inputs) == len(targets) == 1:
        return item[inputs[0]], item[targets[0]]
    known = f"one of {', '.join(INPUT_KEYS)} and one of {', '.join(TARGET_KEYS)}, and no others"
    text = f"item {number} has the keys {', '.join(map(str, item))}; supported: {known}"
    if "input_ids" in others:
        text += " (labels of transformers are the input tokens; here, targets are one token later)"
    raise BadItem(name, f"{text}; return a tuple (inputs..., target), in the order of the model's forward")


def _unlike(pairs: Sequence[tuple[int, Any]], items: Sequence[Item]) -> str:
    """Describes the first item whose number of parts or shapes differ from those of item 0; else empty."""
    (first, _), shapes = pairs[0], [[tuple(np.shape(_sized(part))) for part in item] for item in items]
    for (number, _), item, have in zip(pairs, items, shapes, strict=True):
        if len(have) != len(shapes[0]):
            return (
                f"item {number} has {len(have)} parts, item {first} {len(shapes[0])}; all "
                "must have the same parts"
            )
        for at, (one, other) in enumerate(zip(have, shapes[0], strict=True)):
            if one != other:
                text = f"{_part(at, item)} of item {number} has shape {one}, of item {first} {other}"
                return f"{text}; all samples must have one shape: cut them or pad them"
    return ""


def _foreign(pairs: Sequence[tuple[int, Any]], items: Sequence[Item]) -> str:
    """Describes the first part of an item that cannot become a tensor; empty if all can."""
    for (number, _), item in zip(pairs, items, strict=True):
        for at, part in enumerate(item):
            if isinstance(part, Tensor) and part.layout is not torch.strided:
                kind = str(part.layout).removeprefix("torch.")
                return f"{_part(at, item)} of item {number} is a {kind} tensor; convert it with .to_dense()"
            if not isinstance(part, Tensor | np.ndarray | np.generic | Mapping | Sequence | int | float):
                text = f"{_part(at, item)} of item {number} has type {type(part).__name__}"
                return f"{text}, which cannot become a tensor; {RETURN}"
    return ""


def _sized(value: Any) -> Any:
    return value if isinstance(value, Tensor | np.ndarray) else 0


def _part(at: int, item: Item) -> str:
    return "the target" if at == len(item) - 1 else f"input {at}"
