"""Refuses data-dependent control flow: tracing has seen one branch only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves

READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
"""What hands the numbers out without an operation."""
TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


SIZES = frozenset({
    "_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave",
    "unique_consecutive", "unique_dim", "_unique", "_unique2",
})  # fmt: skip
"""Operators whose result is a number for Python, or has a shape that depends on the numbers."""


class _InputDependence(Dispatch):
    """Knows the tensors that come from those ``given``; what comes of none, such as positions, is constant.

    ``refuse`` is called, and raises, when one of them decides what is done.
    """

    def __init__(self, given: Iterable[Tensor], refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {id(t): t for t in given}  # kept alive: a freed tensor's id could come back as another's
        self.refuse = refuse

    def among(self, *values: Any) -> bool:
        return any(id(t) in self.given for t in tree_leaves(values) if isinstance(t, Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self.among(args, kwargs)
        if given and not TAGS.isdisjoint(func.tags):
            self.refuse()
        out = func(*args, **(kwargs or {}))
        if given:
            self.given |= {id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


class _Reads(TorchFunctionMode):
    def __init__(self, given: _InputDependence) -> None:
        super().__init__()
        self.given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self.given.among(args):
            self.given.refuse()
        return func(*args, **(kwargs or {}))


@contextmanager
def looking(given: Iterable[Tensor], refuse: Callable[[], None]) -> Iterator[None]:
    """``refuse`` is called when what comes from the tensors ``given`` decides what is done meanwhile."""
    mode = _InputDependence(given, refuse)
    with mode, _Reads(mode):
        yield


class Sized(Dispatch):
    """Tells of operators whose result Python could not know without the numbers."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and _masks(args[1])
        if masked or func._overloadpacket.__name__ in SIZES:
            self.told((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def _masks(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
