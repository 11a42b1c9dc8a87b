"""Finds code of a forward that reads values which depend on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.modes import Dispatch, tree_leaves

METHODS_THAT_READ = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
"""Functions that pass values to Python without an operation."""


TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


SIZES = frozenset({
    "_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave",
    "unique_consecutive", "unique_dim", "_unique", "_unique2",
})  # fmt: skip
"""Operators whose result is a number for Python, or has a shape that depends on the values."""


class _InputDependence(Dispatch):
    """Tracks the tensors that depend on ``inputs``; other tensors, such as positions, are constant.

    ``refuse`` is called, and raises, if Python reads such a tensor, or a shape depends on its values.
    """

    def __init__(self, inputs: Iterable[Tensor], refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dependent = {id(t): t for t in inputs}  # kept alive, as a freed tensor's id could be reused
        self.refuse = refuse

    def among(self, *values: Any) -> bool:
        return any(id(t) in self.dependent for t in tree_leaves(values) if isinstance(t, Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dependent = self.among(args, kwargs)
        if dependent and not TAGS.isdisjoint(func.tags):
            self.refuse()
        out = func(*args, **(kwargs or {}))
        if dependent:
            self.dependent |= {id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, dependence: _InputDependence) -> None:
        super().__init__()
        self.dependence = dependence

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS_THAT_READ and self.dependence.among(args):
            self.dependence.refuse()
        return func(*args, **(kwargs or {}))


@contextmanager
def looking(inputs: Iterable[Tensor], refuse: Callable[[], None]) -> Iterator[None]:
    """Calls ``refuse`` if Python, or a shape, depends on values that depend on ``inputs`` while entered."""
    mode = _InputDependence(inputs, refuse)
    with mode, _Reads(mode):
        yield


class Sized(Dispatch):
    """Reports operators of which Python sees a value: a number, or a shape that depends on values."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and _masks(args[1])
        if masked or func._overloadpacket.__name__ in SIZES:
            self.report((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def _masks(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
