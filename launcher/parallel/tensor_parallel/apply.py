"""Cuts the weights of operators over the tensor-parallel axis and installs forwards with the collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from launcher.parallel.local import local
from launcher.parallel.mesh import Meshes
from launcher.parallel.stages.split import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis, bring, hand, with_bias
from launcher.parallel.tensor_parallel.overlapped_linear import OverlappedLinear
from launcher.parallel.trace.param_roles import ADAPTER, adds
from launcher.plan.operators.resolve import Spread, all_reduced, splits, tp_dim
from launcher.plan.operators.strategy import Axes
from launcher.plan.plan import Plan


def spread(model: nn.Module, plan: Plan) -> Axis:
    """Make ``model`` (on the meta device) what one rank of ``tp`` runs, once that has joined the axis."""
    axis = Axis(plan.sizes.grid["tp"], planned=True, bias_in_terms=plan.operators.bias_in_terms)
    spreads = plan.operators.spreads
    cut(model, splits([s.operator for s in spreads]), axis)
    install(model, spreads, axis, plan.operators.overlapped)
    return axis


def distribute(parts: Iterable[StagePart], plan: Plan, meshes: Meshes) -> None:
    """Pieces become DTensors: FSDP2 and optimizers then know what they are pieces of.

    What is shared stays so.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    dims = {name: tp_dim(p.layout.split) for p in plan.params for name in p.names}
    for part in parts:
        for path, module in part.module.named_modules(remove_duplicate=False):
            for attr, p in list(module._parameters.items()):
                dim = dims.get(f"{path}.{attr}".lstrip("."))
                if p is None or dim is None:
                    continue

                # one DTensor for each tensor, under whatever names
                if p not in made:
                    whole = DTensor.from_local(p.detach(), meshes.mesh["tp"], [Shard(dim)], run_check=False)
                    made[p] = nn.Parameter(whole, p.requires_grad)
                    made[made[p]] = made[p]
                module._parameters[attr] = made[p]


def cut(model: nn.Module, splits: Mapping[str, Axes], axis: Axis) -> None:
    """Swap each parameter that ``splits`` names for a meta tensor of this rank's piece; ties stay ties."""
    pieces: dict[int, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, axes in splits.items():
        dim, whole = tp_dim(axes), named[name]
        assert dim is not None
        if id(whole) not in pieces:
            shape = [*whole.shape]
            shape[dim] //= axis.size
            empty = torch.empty(shape, dtype=whole.dtype, device=whole.device)
            pieces[id(whole)] = nn.Parameter(empty, whole.requires_grad)
        owner, _, attr = name.rpartition(".")
        model.get_submodule(owner)._parameters[attr] = pieces[id(whole)]


def install(
    model: nn.Module, spreads: Iterable[Spread], axis: Axis, overlapped: Collection[str] = ()
) -> None:
    """Give each operator's module the forward that its spread describes; ``overlapped`` is ``Flow``'s."""
    for s in spreads:
        module = model.get_submodule(s.operator.module)
        module.forward = OperatorForward(module, module.forward, s, axis, s.operator.module in overlapped)


@dataclass(frozen=True)
class OperatorForward:
    """The forward of an operator, around the ``plain`` one of its module.

    ``overlaps``: the gradient of its input is sent while that of its weight is computed.
    """

    module: nn.Module
    plain: Callable[..., Any]
    spread: Spread
    axis: Axis
    overlaps: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the first input to what the operator takes, compute, hand on."""
        x, *rest = args if args else (kwargs.pop("input"),)
        s = self.spread
        terms = s.operator.mode == "column"
        if not self.overlaps or not torch.is_grad_enabled() or not x.requires_grad:
            x = bring(x, s.arrives, s.takes, self.axis, terms=terms)
            return self.hand_on(self.compute(x, *rest, **kwargs))

        # a product of its own, unless a neighbour has brought the input before
        linear = OverlappedLinear(self._weights)
        x = bring(x, s.arrives, s.takes, self.axis, terms=terms, enter=linear.enter)
        y = linear.product(x)
        return self.hand_on(self.compute(x, *rest, **kwargs) if y is None else y)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        """Those of a linear layer's product: the bias of a row-parallel one is added later."""
        bias = getattr(self.module, "bias", None) if self.spread.operator.mode != "row" else None
        return weight(self.module), None if bias is None else local(bias)

    def compute(self, x: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """What this rank works out; of a row-parallel layer and a part of a table, a term of the sum."""
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
        """The bias of a row-parallel layer is added once: to the sum, or to the term of one rank."""
        s = self.spread
        bias: Any = getattr(self.module, "bias", None) if s.operator.mode == "row" else None
        early = bias is not None and self.axis.bias_in_terms and all_reduced(s)
        if early:
            y = with_bias(y, bias, self.axis)
        if s.sums or s.makes != s.gives:
            y = hand(y, s, self.axis)
        return y if early or bias is None else y + bias


def weight(module: nn.Module) -> Tensor:
    """This rank's piece of the module's weight, in the autograd graph."""
    return local(module.weight)  # type: ignore[arg-type]


def with_adapter(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """``y``, what a linear layer makes of ``x``, with what its adapter adds, if it has one.

    Where the weight is cut on its outputs ``lora_B`` is too, and on its inputs ``lora_A``: what they make is
    of the same kind as ``y``, and of the gradient of the other one each rank has a term.
    """
    adapter = adds(module)
    return y if adapter is None else y + adapter(x, *(local(module.get_parameter(n)) for n in ADAPTER))


def _look_up(module: nn.Module, indices: Tensor, axis: Axis) -> Tensor:
    """Rows of this rank's part of the table; zeros for those that lie in another's."""
    table = weight(module)
    low = axis.rank * table.shape[0]
    end = low + table.shape[0]
    here = (indices >= low) & (indices < end)

    # the row of padding, if it is one of these
    pad = getattr(module, "padding_idx", None)
    if pad is not None:
        pad = pad - low if low <= pad < end else None
    rows = F.embedding(torch.where(here, indices - low, 0), table, pad)
    return rows * here.unsqueeze(-1).to(rows.dtype)
