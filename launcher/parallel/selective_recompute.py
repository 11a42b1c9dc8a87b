"""The operations whose results selective recomputation keeps.

Torch's own way intercepts every operation twice, in Python; on a GPU that takes longer than running all of
them again. Here a function mode sees the functions that the forward calls. A function whose result is kept
runs as usual, but autograd saves its arguments only as references, which are resolved once the forward has
run again. In that second run the function is not called: its kept result is returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.tensor_parallel.collectives import COLLECTIVES

KINDS: dict[str, frozenset[str]] = {
    "matmul": frozenset({"mm", "addmm", "_scaled_mm", "_grouped_mm"}),
    "batched_matmul": frozenset({"bmm", "baddbmm"}),
    "attention": frozenset({
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
        "_efficient_attention_forward", "flex_attention",
    }),
    "convolution": frozenset({"convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"}),
    "normalization": frozenset({
        "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm",
        "_native_batch_norm_legit", "cudnn_batch_norm",
    }),
    "activation": frozenset({"gelu", "silu", "relu", "sigmoid", "tanh", "_softmax", "_log_softmax"}),
    "random": frozenset({"native_dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like"}),
}  # fmt: skip
"""Operations by their names in ATen, without overloads."""
SENT = "sent"
"""Results of tensor-parallel collectives, which are operations of a graph and are kept there."""


@cache
def _named(kinds: tuple[str, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(COLLECTIVES if kind == SENT else KINDS[kind] for kind in kinds))


def is_kept(func: Any, kinds: Iterable[str]) -> bool:
    """Returns true if the result of this ATen operation is kept."""
    return (
        func._overloadpacket.__name__ in _named(tuple(kinds)) if hasattr(func, "_overloadpacket") else False
    )


class ReportKeptResults(Dispatch):
    """Reports the kept results to ``keep``; entered around the mode that keeps them.

    Raises the exception that ``refused`` makes if a kept result is changed in place: below autograd nothing
    else would notice that.
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        keep: Callable[[torch.Tensor], Any],
        refused: Callable[[str], Exception],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds = kinds
        self.keep = keep
        self.refused = refused
        self.kept: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for t in written(func, args, kwargs):
            if name := self.kept.get(t.untyped_storage()._cdata):
                raise self.refused(f"it changes the result of {name} in place, which must be kept")
        if is_kept(func, self.kinds):
            for t in tensors((out,)):
                self.keep(t)
                self.kept[t.untyped_storage()._cdata] = func._overloadpacket.__name__
        return out


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an ATen operation changes in place."""
    for at, a in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if a.alias_info is not None and a.alias_info.is_write:
            yield from tensors((args[at] if at < len(args) else kwargs.get(a.name),))


def operation_contexts(
    kinds: tuple[str, ...],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns a context that keeps results in a forward, and one that supplies them when it runs again."""

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(func, kinds) else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    first.respect_saved_tensors_hooks = False  # new in torch 2.15; before, hooks never saw kept results
    return first, again


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
"""Functions that may run a single operation; none of them changes a tensor or draws random numbers.

Every kind that can be kept is listed, except those of ``BY_OPERATION``.
"""
PLAIN = (Tensor, nn.Parameter)
SMALL_BYTES = 64
"""The most bytes of a small tensor, such as a seed, that a kernel saves besides its result."""


@dataclass
class RecomputedCalls:
    """What is known of the calls of one recomputed module.

    ``by_operation`` says why its results are kept operation by operation, as torch does; "" if they are not.
    """

    watched: bool = False
    by_operation: str = ""


def contexts(
    name: str, kinds: tuple[str, ...], calls: RecomputedCalls, refused: Callable[[str], Exception]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts around the forward of module ``name``, and around its run in the backward.

    They raise the exception that ``refused`` makes if a kept result is changed in place.
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
def _watching(name: str, first: _First, calls: RecomputedCalls) -> Iterator[None]:
    """Checks in the first forward whether all operations to keep run inside of functions of ``FUNCTIONS``."""
    missed = _Missed(first)
    with missed:
        yield
    calls.watched = True
    if missed.names:
        calls.by_operation = ", ".join(sorted(missed.names))
        text = "torch shows no function that calls"
        slower = "so results are kept operation by operation, which is slower"
        _log.info("parallel.recompute: %s: %s %s, %s", name, text, calls.by_operation, slower)


class _Missed(Dispatch):
    """Collects the operations to keep that run outside of a kept call."""

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
    """One call in the order of the forward.

    Attributes:
        keeps: whether its result is kept.
        value: the kept result, until it is used.
        version: the version of the result when it was kept.
        learns: whether the result has a backward.
        used: the positions of the tensors among its arguments that its backward needs.
    """

    func: Any
    keeps: bool = False
    value: Tensor | None = None
    version: int = 0
    learns: bool = False
    used: tuple[int, ...] = ()


class _First(TorchFunctionMode):
    """Active in the forward: keeps results of calls."""

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
        arguments = list(tensors((args, kwargs)))
        saved = _Saved(arguments)
        torch._C._autograd._push_saved_tensors_default_hooks(saved.pack, saved.unpack)
        try:
            out: Tensor = func(*args, **kwargs)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        saved.end()
        self.kept.append(_Call(func, True, out.detach(), out._version, out.requires_grad, saved.used))
        return out


class _Again(TorchFunctionMode):
    """Active in the run in the backward: returns kept results, and drops each after its use.

    A second run in the backward computes them again.
    """

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
            raise self.refused(f"it calls {_name(func)} where its first run did not")
        call, at = self.kept[self.at], self.at
        self.at += 1
        if not call.keeps:
            return func(*args, **kwargs)

        # the arguments that its backward needs, and its result
        if call.used:
            _mark(list(tensors((args, kwargs))), call.used)
        if call.value is None:
            with torch.no_grad():
                value: Tensor = func(*args, **kwargs)
            return value.detach().requires_grad_(call.learns)
        if call.value._version != call.version:
            raise self.refused(f"it changes the result of {_name(func)} in place, which must be kept")
        self.kept[at] = replace(call, value=None)
        return call.value.requires_grad_(call.learns)


@dataclass(frozen=True)
class _Place:
    """The place of a tensor that a backward needs: a view of the argument ``used[at]``, or all of it."""

    at: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass
class _Saved:
    """The tensors that a call saves for its backward; one of the ``arguments`` is saved as a ``_Place``."""

    arguments: list[Tensor]
    used: tuple[int, ...] = ()
    mark: Any = None
    places: int = 0
    values: tuple[Tensor, ...] | None = field(default=None, repr=False)
    remaining: int = 0

    def pack(self, t: Tensor) -> Tensor | _Place:
        index = _argument(t, self.arguments)
        if index is None:
            return t.detach()
        if index not in self.used:
            self.used = (*self.used, index)
        self.places += 1
        argument = self.arguments[index]
        alike = t.shape == argument.shape and t.stride() == argument.stride()
        offset = int(t.storage_offset() - argument.storage_offset())
        view = None if alike and not offset else (tuple(t.shape), t.stride(), offset)
        return _Place(self.used.index(index), view)

    def end(self) -> None:
        """Hands the arguments over to torch's checkpoint, after the call has returned."""
        if self.used:
            self.mark = _mark(self.arguments, self.used)
        self.arguments = []

    def unpack(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.values is None:  # runs the forward again, unless it has run
            self.values, self.remaining = self.mark.grad_fn.saved_tensors, self.places
        assert self.values is not None
        value = self.values[saved.at]
        self.remaining -= 1
        if not self.remaining:
            self.values = None
        if saved.view is None:
            return value
        shape, stride, offset = saved.view
        return value.as_strided(shape, stride, value.storage_offset() + offset)


class _Mark(Function):
    """A node that no backward runs; torch's checkpoint handles its saved tensors like any operation's."""

    @staticmethod
    def forward(ctx: Any, learning: Tensor, *used: Tensor) -> Tensor:
        ctx.save_for_backward(*used)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("its result is not used")


def _mark(arguments: Sequence[Tensor], used: Sequence[int]) -> Tensor:
    """Returns a tensor whose node keeps the ``used`` tensors of ``arguments``.

    Before torch 2.13 the node drops what it has saved when this tensor is freed.
    """
    learning = next(t for t in arguments if t.requires_grad)
    made: Tensor = _Mark.apply(learning, *(arguments[i] for i in used))  # type: ignore[no-untyped-call]
    return made


def _argument(t: Tensor, arguments: Sequence[Tensor]) -> int | None:
    """Returns the index of the argument that is ``t``, or of which ``t`` is a view.

    If there are several, one with the same storage offset is preferred.
    """
    storage = t.untyped_storage()._cdata
    same = [i for i, g in enumerate(arguments) if g.untyped_storage()._cdata == storage]
    if len(same) > 1:
        same.sort(key=lambda i: arguments[i].storage_offset() != t.storage_offset())
    return same[0] if same else None


_known: dict[Any, bool] = {}
"""Tells whether a call is one operation to keep; the key is all that the choice of kernels depends on."""


def _is_one_operation(func: Any, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> bool:
    """Returns true if the call runs one operation of ``kinds``, and its backward needs no other result."""
    if torch._C._are_functorch_transforms_active():
        return False  # their tensors have no storage to recognize a result by
    key = _key((args, kwargs))
    if key is None:
        return False
    key = (func, kinds, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), key)
    try:
        answer = _known.get(key)
    except TypeError:  # an argument without a hash
        return False
    if answer is None:
        answer = _known[key] = _tried(func, args, kwargs, kinds)
    return answer


def _key(value: Any) -> Any:
    """Returns a hashable key of the arguments; ``None`` for other tensor classes, and for complex tensors."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN or value.is_complex() or value.layout != torch.strided:
            return None
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        value = tuple(value.items())
    if not isinstance(value, tuple | list):
        return (value,)
    keys = tuple(_key(v) for v in value)
    return None if None in keys else keys


def _tried(func: Any, args: Any, kwargs: Any, kinds: tuple[str, ...]) -> bool:
    """Decides by one additional call of the function."""
    if func is F.scaled_dot_product_attention and _drops_out(args, kwargs):
        return False  # skipping its draw would shift all later draws
    results = _Results(kinds)
    saved: list[Tensor] = []

    def save(t: Tensor) -> Tensor:
        saved.append(t.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), results:
        out = func(*args, **kwargs)
    if type(out) is not Tensor or not results.has(out):
        return False
    arguments = list(tensors((args, kwargs)))
    return all(results.has(t) or t.nbytes <= SMALL_BYTES or _fits(t, arguments) for t in saved)


def _drops_out(args: Any, kwargs: Any) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _fits(t: Tensor, arguments: Sequence[Tensor]) -> bool:
    """Returns true if ``t`` can be restored from an argument."""
    index = _argument(t, arguments)
    return index is not None and t.dtype == arguments[index].dtype and t.numel() <= arguments[index].numel()


class _Results(Dispatch):
    """Collects the storages that operations of ``kinds`` have returned."""

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
