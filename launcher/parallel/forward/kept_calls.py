"""Keeps results of operations for a forward that runs again, call by call, without looking at each operation.

Torch's own way looks at every operation twice, in Python; on a GPU that takes longer than running all of
them again. Here a mode sees the functions that the forward calls. One whose result is to be kept runs as
ever, but of its arguments autograd keeps only where they will be found once the forward has run again. Then
the function is not called: its result is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.forward.kept_operations import is_kept

_log = logging.getLogger(__name__)

PRODUCTS = (
    F.linear, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__,
    Tensor.__rmatmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
)  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "matmul": PRODUCTS,
    "batched_matmul": PRODUCTS,
    "attention": (F.scaled_dot_product_attention,),
    "convolution": (
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    ),
    "normalization": (
        F.layer_norm, F.group_norm, F.rms_norm, torch.layer_norm, torch.group_norm, torch.rms_norm,
    ),
    "activation": (
        F.gelu, torch.relu, Tensor.relu, torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh,
        F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax,
    ),
}  # fmt: skip
"""The functions whose result may be that of one operation; none of them changes anything, or draws.

All kinds have some but those of ``BY_OPERATION``.
"""
PLAIN = (Tensor, nn.Parameter)
SMALL = 64
"""Bytes of numbers that a kernel keeps besides its result, as a seed."""


@dataclass
class Calls:
    """What is known of the calls of one module that runs again.

    ``by_operation``: why its results are kept operation by operation, as torch does it; "" if they are not.
    """

    watched: bool = False
    by_operation: str = ""


def contexts(
    name: str, kinds: tuple[str, ...], calls: Calls, refused: Callable[[str], Exception]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward of module ``name``, and around its run in the backward.

    Raises what ``refused`` makes where a result that is kept is changed in place.
    """
    kept: list[_Call] = []
    functions = frozenset(f for kind in kinds for f in FUNCTIONS[kind])
    first = _First(kinds, functions, kept)
    watching = nullcontext() if calls.watched else _watching(name, first, calls)
    return _both(watching, first), _Again(functions, kept, refused)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _watching(name: str, first: _First, calls: Calls) -> Iterator[None]:
    """The first forward: do all operations that are to be kept run in functions that are known here?"""
    missed = _Missed(first)
    with missed:
        yield
    calls.watched = True
    if missed.names:
        calls.by_operation = ", ".join(sorted(missed.names))
        text = "is the result of no function that torch lets us see; kept operation by operation, slower"
        _log.info("parallel.recompute: %s: %s %s", name, calls.by_operation, text)


class _Missed(Dispatch):
    """Collects the operations that are to be kept and run in no call that is."""

    def __init__(self, first: _First) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first = first
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.first.inside and is_kept(func, self.first.kinds):
            self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@dataclass
class _Call:
    """One call in the order of the forward; ``value``: its result, if it ``keeps`` that, until it is used.

    ``used``: the tensors among its arguments that its backward needs. ``learns``: whether it has one.
    """

    func: Any
    keeps: bool = False
    value: Tensor | None = None
    version: int = 0
    learns: bool = False
    used: tuple[int, ...] = ()


class _First(TorchFunctionMode):
    """The forward, with what is kept of it."""

    def __init__(self, kinds: tuple[str, ...], functions: frozenset[Any], kept: list[_Call]) -> None:
        super().__init__()
        self.kinds = kinds
        self.functions = functions
        self.kept = kept
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.functions:
            return func(*args, **kwargs)
        self.inside = True
        try:
            if _is_one_operation(func, args, kwargs, self.kinds):
                return self._keep(func, args, kwargs)
        finally:
            self.inside = False
        self.kept.append(_Call(func))
        return func(*args, **kwargs)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        given = list(tensors((args, kwargs)))
        saved = _Saved(given)
        torch._C._autograd._push_saved_tensors_default_hooks(saved.pack, saved.unpack)
        try:
            out: Tensor = func(*args, **kwargs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        saved.end()
        self.kept.append(_Call(func, True, out.detach(), out._version, out.requires_grad, saved.used))
        return out


class _Again(TorchFunctionMode):
    """Its run in the backward. Results are let go as they are used; a second run makes them once more."""

    def __init__(
        self, functions: frozenset[Any], kept: list[_Call], refused: Callable[[str], Exception]
    ) -> None:
        super().__init__()
        self.functions = functions
        self.kept = kept
        self.refused = refused
        self.at = 0

    def __enter__(self) -> Self:
        self.at = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.functions:
            return func(*args, **kwargs)
        if self.at == len(self.kept) or self.kept[self.at].func is not func:
            raise self.refused(f"{_name(func)} is not what the forward called in its place")
        call, at = self.kept[self.at], self.at
        self.at += 1
        if not call.keeps:
            return func(*args, **kwargs)

        # what its backward needs of its arguments, and its result
        if call.used:
            _mark(list(tensors((args, kwargs))), call.used)
        if call.value is None:
            with torch.no_grad():
                value: Tensor = func(*args, **kwargs)
            return value.detach().requires_grad_(call.learns)
        if call.value._version != call.version:
            raise self.refused(f"it changes the result of {_name(func)} in place, which is to be kept")
        self.kept[at] = replace(call, value=None)
        return call.value.requires_grad_(call.learns)


@dataclass(frozen=True)
class _Place:
    """Where a tensor that a backward needs is: in the argument ``used[at]``, or it is all of that."""

    at: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass
class _Saved:
    """What the backward of one call needs; of its arguments ``given`` only where in them that is."""

    given: list[Tensor]
    used: tuple[int, ...] = ()
    mark: Any = None
    places: int = 0
    values: tuple[Tensor, ...] | None = field(default=None, repr=False)
    left: int = 0

    def pack(self, t: Tensor) -> Tensor | _Place:
        found = _argument(t, self.given)
        if found is None:
            return t.detach()
        if found not in self.used:
            self.used = (*self.used, found)
        self.places += 1
        whole = self.given[found]
        alike = t.shape == whole.shape and t.stride() == whole.stride()
        offset = int(t.storage_offset() - whole.storage_offset())
        view = None if alike and not offset else (tuple(t.shape), t.stride(), offset)
        return _Place(self.used.index(found), view)

    def end(self) -> None:
        """The call has returned: torch's checkpoint looks after its arguments from here on."""
        if self.used:
            self.mark = _mark(self.given, self.used)
        self.given = []

    def unpack(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.values is None:  # the forward runs again, unless it has
            self.values, self.left = self.mark.grad_fn.saved_tensors, self.places
        assert self.values is not None
        value = self.values[saved.at]
        self.left -= 1
        if not self.left:
            self.values = None
        if saved.view is None:
            return value
        shape, stride, offset = saved.view
        return value.as_strided(shape, stride, value.storage_offset() + offset)


class _Mark(Function):
    """A node that no backward runs, for what it keeps: an operation as others for torch's checkpoint."""

    @staticmethod
    def forward(ctx: Any, learning: Tensor, *used: Tensor) -> Tensor:
        ctx.save_for_backward(*used)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing comes of its result")


def _mark(given: Sequence[Tensor], used: Sequence[int]) -> Tensor:
    """What keeps them: its node lets go of what it has saved when this tensor is gone, before torch 2.13."""
    learning = next(t for t in given if t.requires_grad)
    made: Tensor = _Mark.apply(learning, *(given[i] for i in used))  # type: ignore[no-untyped-call]
    return made


def _argument(t: Tensor, given: Sequence[Tensor]) -> int | None:
    """The tensor that ``t`` is, or is a view of; the one that begins where it does, if there are several."""
    storage = t.untyped_storage()._cdata
    same = [i for i, g in enumerate(given) if g.untyped_storage()._cdata == storage]
    if len(same) > 1:
        same.sort(key=lambda i: given[i].storage_offset() != t.storage_offset())
    return same[0] if same else None


_known: dict[Any, bool] = {}
"""Calls that are one operation to be kept, by all that the kernels hang on."""


def _is_one_operation(func: Any, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> bool:
    """Whether the result is that of an operation of ``kinds``: with the arguments all a backward needs."""
    key = _key((args, kwargs))
    if key is None:
        return False
    key = (func, kinds, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), key)
    try:
        found = _known.get(key)
    except TypeError:  # an argument that has no hash
        return False
    if found is None:
        found = _known[key] = _tried(func, args, kwargs, kinds)
    return found


def _key(value: Any) -> Any:
    """``None`` for what is not followed: tensors of other classes, and complex ones."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN or value.is_complex() or value.layout != torch.strided:
            return None
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        value = tuple(value.items())
    if not isinstance(value, tuple | list):
        return (value,)
    found = tuple(_key(v) for v in value)
    return None if None in found else found


def _tried(func: Any, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> bool:
    """By calling it once more than the forward does."""
    if func is F.scaled_dot_product_attention and _drops_out(args, kwargs):
        return False  # what is not drawn again would move all that is drawn after it
    seen = _Results(kinds)
    saved: list[Tensor] = []

    def save(t: Tensor) -> Tensor:
        saved.append(t.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), seen:
        out = func(*args, **kwargs)
    if type(out) is not Tensor or not seen.has(out):
        return False
    given = list(tensors((args, kwargs)))
    return all(seen.has(t) or t.nbytes <= SMALL or _fits(t, given) for t in saved)


def _drops_out(args: Any, kwargs: Any) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _fits(t: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether it can be found in an argument."""
    found = _argument(t, given)
    return found is not None and t.dtype == given[found].dtype and t.numel() <= given[found].numel()


class _Results(Dispatch):
    """The storages that operations of ``kinds`` have returned."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds = kinds
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_kept(func, self.kinds):
            self.made += tensors((out,))
        return out

    def has(self, t: Tensor) -> bool:
        storage = t.untyped_storage()._cdata
        return any(made.untyped_storage()._cdata == storage for made in self.made)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
