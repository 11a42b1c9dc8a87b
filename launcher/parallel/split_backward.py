"""Splits a backward in two: weight gradients of matmuls wait for its second half (zero-bubble schedules)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from launcher.errors import RunError
from launcher.parallel.local_tensors import local

TRANSPOSES = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0"})
LOCAL_SHARD = "_ToTorchTensorBackward"
IN_NO_BACKWARD = -1


@dataclass(frozen=True)
class MatmulCall:
    """One matrix product as the user wrote it.

    ``across``: the weight maps its columns to its rows, as in a linear.
    """

    run: Callable[..., Tensor]
    x: Any
    weight: Any
    bias: Any
    across: bool


@dataclass(frozen=True)
class DeferredProduct:
    """A gradient of ``weight`` still to be computed: ``left`` transposed times ``right``, over their rows.

    ``versions`` are the versions of both at the end of the first half.
    """

    weight: nn.Parameter
    left: Tensor
    right: Tensor
    versions: tuple[int, int]

    @property
    def flops(self) -> int:
        return 2 * self.left.numel() * self.right.shape[-1]

    @torch.no_grad()
    def add(self) -> None:
        """Adds the product to the weight's gradient, as autograd does.

        A new gradient gets the strides of the weight.
        """
        if (self.left._version, self.right._version) != self.versions:
            text = f"the input of a weight of shape {tuple(self.weight.shape)} was changed in place"
            why = "between the two halves of the backward, and the second half needs it"
            raise RunError(f"{text} {why} (try: parallel.pipeline.scheduler=1f1b)")
        left, right = _as_matrix(self.left), _as_matrix(self.right)
        there = self.weight.grad
        if there is None:
            grad = _gradient(self.weight, left, right)
            self.weight.grad = grad.to(self.weight.grad_dtype or grad.dtype)
        elif local(there).layout == torch.strided and there.dtype == left.dtype:
            local(there).addmm_(left.t(), right)
        elif local(there).layout == torch.strided:  # FSDP2 sums in a wider dtype
            local(there).add_(local(_gradient(self.weight, left, right)))
        else:  # a sparse gradient of a tied embedding
            self.weight.grad = there + _gradient(self.weight, left, right)


class Deferral(TorchFunctionMode):
    """Defers weight gradients of a stage: while ``deferring``, a backward leaves them out.

    It is entered around the forwards of the stage. Only the backward from the roots of ``deferring`` is
    split, and only matrix products are deferred. ``autograd.grad`` in a forward of the user, a backward
    inside a backward and a second derivative are computed at once and in full.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: frozenset[int] = frozenset()
        self.queue: list[DeferredProduct] | None = None
        self._task = IN_NO_BACKWARD

    @contextmanager
    def running(self, inputs: Iterable[Any]) -> Iterator[None]:
        """Runs a forward of ``inputs``.

        Only products of ``inputs`` and of tensors with a gradient are deferred: anything else may be changed
        in place before the second half, without autograd's knowledge.
        """
        self.inputs = frozenset(_storage(t) for t in inputs if isinstance(t, Tensor))
        with self:
            yield

    @contextmanager
    def deferring(self, roots: Iterable[Tensor | GradientEdge]) -> Iterator[list[DeferredProduct]]:
        """Yields the queue of products that the backward from ``roots`` leaves for the second half."""
        queue = self.queue = list[DeferredProduct]()
        edges = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in roots if _learns(t)]
        hooks = [edge.node.register_prehook(self._begin) for edge in edges]
        try:
            yield queue
        finally:
            self.queue, self._task = None, IN_NO_BACKWARD
            for hook in hooks:
                hook.remove()

    def _begin(self, _: Any) -> None:
        self._task = torch._C._current_graph_task_id()

    def later(self) -> list[DeferredProduct] | None:
        """Returns the queue if the backward that runs now defers its products, else ``None``."""
        mine = self.queue is not None and torch._C._current_graph_task_id() == self._task
        return self.queue if mine and not torch.is_grad_enabled() else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = FORMS.get(func)
        call = form(args, kwargs) if form is not None and torch.is_grad_enabled() else None
        if call is not None and self._fits(call):
            leaf = _leaf(call.weight)
            if leaf is not None:
                return self.apply(call, *leaf)
        return func(*args, **kwargs)

    def apply(self, call: MatmulCall, leaf: nn.Parameter, turned: bool) -> Any:
        """Computes the product of ``call``; ``turned``: its weight is the transpose of ``leaf``."""
        use = _Use(call, turned, self)
        return _Product.apply(call.x, leaf, call.bias, use)  # type: ignore[no-untyped-call]

    def _fits(self, call: MatmulCall) -> bool:
        """Returns true if our product behaves as autograd's would."""
        x = call.x
        operands = [x] if call.bias is None else [x, call.bias]
        if transformed() or _checkpointed():  # first: tensors of torch.func have no memory
            return False
        if not isinstance(call.weight, Tensor) or call.weight.layout != torch.strided:
            return False
        dtype = call.weight.dtype
        if any(type(t) not in PLAIN or t.dtype != dtype or t.layout != torch.strided for t in operands):
            return False
        known = x.requires_grad or _storage(x) in self.inputs
        return bool(x.dim() > 1 and x.is_floating_point() and known)


PLAIN = (Tensor, nn.Parameter)


def _learns(root: Tensor | GradientEdge) -> bool:
    return isinstance(root, GradientEdge) or root.requires_grad


def _storage(t: Tensor) -> int:
    return int(local(t).untyped_storage()._cdata)


def transformed() -> bool:
    """Returns true if more than plain autograd is active: autocast, torch.func, the compiler."""
    return (
        torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
    )


def _checkpointed() -> bool:
    """Returns true if a checkpoint is active.

    Its recomputation runs without this mode, but must save the same tensors.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and hooks[0].__module__ == checkpoint.__name__


def _leaf(weight: Any) -> tuple[nn.Parameter, bool] | None:
    """Returns the parameter behind ``weight``, and whether ``weight`` is its transpose.

    ``weight`` may also be the parameter itself or its local piece; anything else gives ``None``.
    """
    fn = weight.grad_fn
    turned = fn is not None and fn.name() in TRANSPOSES
    leaf: Any = weight if fn is None else getattr(fn.next_functions[0][0], "variable", None)
    if fn is None:
        fits = type(leaf) is nn.Parameter
    elif turned:
        fits = type(leaf) is nn.Parameter and weight.stride() == leaf.stride()[::-1]
    else:
        fits = fn.name() == LOCAL_SHARD and isinstance(leaf, DTensor)
    fits = fits and leaf.dim() == 2 and leaf.requires_grad and not _hooked(leaf)
    return (leaf, turned) if fits else None


@dataclass(frozen=True)
class Rounding:
    """A hook on a weight that rounds a wider gradient to ``dtype`` and returns it in its own, wider dtype."""

    dtype: torch.dtype

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or grad.dtype == self.dtype:  # None if all of it is deferred
            return grad
        return grad.to(self.dtype).to(grad.dtype)


def _hooked(leaf: nn.Parameter) -> bool:
    """Returns true if ``leaf`` has hooks other than ``Rounding``: they must see the full gradient, once.

    ``Rounding`` may be skipped: products are rounded to their dtype already.
    """
    hooks = (leaf._backward_hooks or {}).values()
    return bool(leaf._post_accumulate_grad_hooks) or any(not isinstance(h, Rounding) for h in hooks)


@dataclass(frozen=True)
class _Use:
    """How a call uses its leaf: ``turned`` as in ``Deferral.apply``; ``to`` may defer the gradient."""

    call: MatmulCall
    turned: bool
    to: Deferral


class _Product(Function):
    """Runs the operation of a call on ``leaf``, which is its weight or (``turned``) the transpose of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, bias: Tensor | None, use: _Use) -> Any:
        # for the backward; hooks on saved tensors may return another leaf, whose gradient would be lost
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, leaf)
        ctx.leaf = leaf
        ctx.across = use.call.across != use.turned
        ctx.to = use.to
        ctx.bias = None if bias is None else bias.shape

        # a view that a Function returns could not be changed in place
        weight = local(leaf)
        out = use.call.run(x, weight.t() if use.turned else weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 4
        x, saved = ctx.saved_tensors
        to_x = to_leaf = to_bias = None

        # first half: the gradient that flows further back
        if ctx.needs_input_grad[0]:
            weight = local(saved)
            to_x = grad @ (weight if ctx.across else weight.t())

        # the weight's gradient: now, or in the second half
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.across else (x, grad)
            queue = ctx.to.later()
            if queue is None:
                to_leaf = _gradient(ctx.leaf, _as_matrix(left), _as_matrix(right))
            else:
                queue.append(DeferredProduct(ctx.leaf, left, right, (left._version, right._version)))

        if ctx.needs_input_grad[2]:
            to_bias = grad.sum_to_size(ctx.bias)
        return to_x, to_leaf, to_bias, None


def _as_matrix(t: Tensor) -> Tensor:
    return t.flatten(0, -2) if t.dim() > 1 else t[None]  # reshape(-1, 0) is ambiguous


def _gradient(leaf: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns the gradient with the strides, and the placements, of ``leaf``."""
    grad = (right.t() @ left).t() if local(leaf).t().is_contiguous() else left.t() @ right
    if not isinstance(leaf, DTensor):
        return grad
    mesh, shape, stride = leaf.device_mesh, leaf.shape, leaf.stride()
    return DTensor.from_local(grad, mesh, leaf.placements, run_check=False, shape=shape, stride=stride)


def _linear(args: Any, kwargs: Any) -> MatmulCall | None:
    named = {"bias": None, **dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    if len(args) > 3 or named.keys() != {"input", "weight", "bias"}:
        return None
    return MatmulCall(F.linear, x=named["input"], weight=named["weight"], bias=named["bias"], across=True)


def _matmul(args: Any, kwargs: Any) -> MatmulCall | None:
    if len(args) != 2 or kwargs or not isinstance(args[1], Tensor) or args[1].dim() != 2:
        return None
    x, weight = args
    return MatmulCall(lambda x, weight, _: torch.matmul(x, weight), x, weight, bias=None, across=False)


def _addmm(args: Any, kwargs: Any) -> MatmulCall | None:
    if len(args) != 3 or kwargs:
        return None
    bias, x, weight = args
    return MatmulCall(
        lambda x, weight, bias: torch.addmm(bias, x, weight), x, weight, bias=bias, across=False
    )


FORMS: dict[Any, Callable[[Any, Any], MatmulCall | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
}
"""The functions that multiply by a weight, each with the parser of its arguments."""
