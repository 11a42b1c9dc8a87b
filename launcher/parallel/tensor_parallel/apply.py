"""Splits the weights of operators over the tensor-parallel axis and installs forwards with collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis, bring, hand, with_bias
from launcher.parallel.tensor_parallel.overlapped_linear import OverlappedLinear
from launcher.parallel.trace.module_kinds import ADAPTER, adds
from launcher.plan.plan import Plan
from launcher.plan.tensor_parallel.module_strategies import splits, tp_dim
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator, all_reduced
from launcher.plan.tensor_parallel.strategy_reader import Axes


def spread(model: nn.Module, plan: Plan) -> Axis:
    """Turns ``model`` (on the meta device) into what one rank of ``tp`` runs once it has joined the axis."""
    axis = Axis(plan.sizes.grid["tp"], planned=True, bias_in_terms=plan.operators.bias_in_terms)
    spreads = plan.operators.spreads
    cut(model, splits([s.operator for s in spreads]), axis)
    install(model, spreads, axis, plan.operators.overlapped)
    return axis


def distribute(parts: Iterable[StagePart], plan: Plan, meshes: Meshes) -> None:
    """Turns pieces into DTensors, so that FSDP2 and optimizers know their full tensors; ties stay ties."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    dims = {name: tp_dim(p.layout.split) for p in plan.params for name in p.names}
    for part in parts:
        for path, module in part.module.named_modules(remove_duplicate=False):
            for attr, p in list(module._parameters.items()):
                dim = dims.get(f"{path}.{attr}".lstrip("."))
                if p is None or dim is None:
                    continue

                # one DTensor per tensor, under all of its names
                if p not in made:
                    dtensor = DTensor.from_local(p.detach(), meshes.mesh["tp"], [Shard(dim)], run_check=False)
                    made[p] = nn.Parameter(dtensor, p.requires_grad)
                    made[made[p]] = made[p]
                module._parameters[attr] = made[p]


def cut(model: nn.Module, splits: Mapping[str, Axes], axis: Axis) -> None:
    """Replaces each parameter in ``splits`` by a meta tensor of this rank's piece; ties stay ties."""
    pieces: dict[int, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, axes in splits.items():
        dim, param = tp_dim(axes), named[name]
        assert dim is not None
        if id(param) not in pieces:
            shape = [*param.shape]
            shape[dim] //= axis.size
            empty = torch.empty(shape, dtype=param.dtype, device=param.device)
            pieces[id(param)] = nn.Parameter(empty, param.requires_grad)
        owner, _, attr = name.rpartition(".")
        model.get_submodule(owner)._parameters[attr] = pieces[id(param)]


def install(
    model: nn.Module, spreads: Iterable[ShardedOperator], axis: Axis, overlapped: Collection[str] = ()
) -> None:
    """Gives each operator's module the forward that its spread describes.

    ``overlapped`` is that of ``TensorParallelPlan``.
    """
    for s in spreads:
        module = model.get_submodule(s.operator.module)
        forward = OperatorForward(module, module.forward, s, axis, s.operator.module in overlapped)
        vars(forward)["__wrapped__"] = module.forward  # code of the model may ask for its signature
        module.forward = forward


@dataclass(frozen=True)
class OperatorForward:
    """The forward of an operator, around the ``plain`` one of its module.

    ``overlaps``: the gradient of its input is sent while the gradient of its weight is computed.
    """

    module: nn.Module
    plain: Callable[..., Any]
    spread: ShardedOperator
    axis: Axis
    overlaps: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Converts the first input to the operator's layout, compute, and converts the output."""
        x, *rest = args if args else (kwargs.pop("input"),)
        s = self.spread
        terms = s.operator.mode == "column"
        if not self.overlaps or not torch.is_grad_enabled() or not x.requires_grad:
            x = bring(x, s.arrives, s.takes, self.axis, terms=terms)
            return self.hand_on(self.compute(x, *rest, **kwargs))

        # a separate product, unless an earlier layer has converted the same input
        linear = OverlappedLinear(self._weights)
        x = bring(x, s.arrives, s.takes, self.axis, terms=terms, enter=linear.enter)
        y = linear.product(x)
        return self.hand_on(self.compute(x, *rest, **kwargs) if y is None else y)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weights of a linear layer's product; a row-parallel layer adds its bias later."""
        bias = getattr(self.module, "bias", None) if self.spread.operator.mode != "row" else None
        return weight(self.module), None if bias is None else local(bias)

    def compute(self, x: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """Computes this rank's output: for a row-parallel layer and a split table, a term of the sum."""
        module = self.module
        match self.spread.operator.mode:
            case "column" | "row":
                return with_adapter(module, x, F.linear(x, *self._weights()))
            case "vocabulary":
                return _look_up(module, x, self.axis)
            case "hidden":
                return F.embedding(x, weight(module), getattr(module, "padding_idx", None))
            case _:
                return self.plain(x, *rest, **kwargs)

    def hand_on(self, y: Any) -> Any:
        """Converts the output, and adds a row-parallel layer's bias once: to the sum, or to a rank's term."""
        s = self.spread
        bias: Any = getattr(self.module, "bias", None) if s.operator.mode == "row" else None
        early = bias is not None and self.axis.bias_in_terms and all_reduced(s)
        if early:
            y = with_bias(y, bias, self.axis)
        if s.sums or s.makes != s.gives:
            y = hand(y, s, self.axis)
        return y if early or bias is None else y + bias


def weight(module: nn.Module) -> Tensor:
    """Returns this rank's piece of the module's weight, in the autograd graph."""
    return local(module.weight)  # type: ignore[arg-type]


def with_adapter(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns ``y``, a linear layer's output for ``x``, plus the output of its adapter, if it has one.

    If the weight is split on its outputs, ``lora_B`` is too; if on its inputs, ``lora_A`` is. So the
    adapter's output has the same layout as ``y``, and each rank has a term of the other factor's gradient.
    """
    adapter = adds(module)
    return y if adapter is None else y + adapter(x, *(local(module.get_parameter(n)) for n in ADAPTER))


def _look_up(module: nn.Module, indices: Tensor, axis: Axis) -> Tensor:
    """Returns rows of this rank's part of the table, and zeros for rows of other ranks."""
    table = weight(module)
    low = axis.rank * table.shape[0]
    end = low + table.shape[0]
    here = (indices >= low) & (indices < end)

    # the padding row, if this rank has it
    pad = getattr(module, "padding_idx", None)
    if pad is not None:
        pad = pad - low if low <= pad < end else None
    rows = F.embedding(torch.where(here, indices - low, 0), table, pad)
    return rows * here.unsqueeze(-1).to(rows.dtype)
