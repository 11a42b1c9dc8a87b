"""Follows how each tensor of a forward is sharded, on meta tensors of one rank's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch import meta_shapes
from launcher.parallel.dispatch.modes import Dispatch, tree_leaves
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.tensor_parallel.op_rules import (
    CutRefused,
    CutState,
    OpCall,
    OpInput,
    OpRow,
    after,
    refuse_cut_features,
)
from launcher.plan.tensor_parallel.module_strategies import Operator
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator

UNITS: dict[Any, str] = {
    F.linear: "linear", F.embedding: "embedding", F.layer_norm: "layer_norm", F.rms_norm: "rms_norm",
    F.scaled_dot_product_attention: "attention", torch.matmul: "matmul", Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul", torch.reshape: "reshape", Tensor.reshape: "reshape",
    torch.flatten: "reshape", Tensor.flatten: "reshape", Tensor.contiguous: "contiguous",
    torch.repeat_interleave: "repeat", Tensor.repeat_interleave: "repeat",
}  # fmt: skip
"""Functions that count as one operation here, whatever torch decomposes them into."""


@dataclass
class ShardingTracker:
    """One pass.

    ``rows`` has its operations in order, ``full_rows`` those of the full model's pass to compare with.
    """

    axis: Axis | None = None
    full_rows: list[OpRow] = field(default_factory=list)
    rows: list[OpRow] = field(default_factory=list)
    states: dict[int, tuple[Tensor, CutState]] = field(default_factory=dict)
    spreads: dict[Operator, ShardedOperator] = field(default_factory=dict)
    terms: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    where: list[str] = field(default_factory=lambda: [""])
    quiet: int = 0
    layers: frozenset[str] = frozenset()

    def restart(self) -> None:
        """Forgets everything recorded."""
        for record in (self.rows, self.states, self.spreads, self.terms, self.full):
            record.clear()
        self.where, self.quiet = [""], 0

    def state(self, t: Tensor) -> CutState:
        return self.states[id(t)][1] if id(t) in self.states else CutState()

    def tag(self, t: Tensor, s: CutState) -> None:
        self.states[id(t)] = (t, s)  # kept alive, as a freed tensor's id could be reused

    def row(self, name: str, outs: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
        """Notes an operation, and returns the shapes of the same operation in the full model."""
        shapes = tuple(tuple(t.shape) for t in outs)
        at = len(self.rows)
        self.rows.append((name, shapes))
        if self.axis is None:
            return shapes
        if (
            at >= len(self.full_rows)
            or self.full_rows[at][0] != name
            or len(self.full_rows[at][1]) != len(shapes)
        ):
            text = f"{name} runs here with the pieces of a rank, but not in the full model"
            raise CutRefused(f"{text}: the code depends on shapes that are cut")
        return self.full_rows[at][1]

    def done(self, name: str, args: Any, kwargs: Any, out: Any, func: Any = None) -> None:
        """Notes an operation outside the operators; it must fit the same operation of the full model."""
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        shapes = self.row(name, outs)
        if self.axis is None:
            return
        ins = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inputs = [OpInput(tuple(t.shape), self.state(t), t.is_floating_point()) for t in ins]
        here = [tuple(t.shape) for t in outs]
        made, mixed = after(OpCall(name, func, args, inputs, here=here, full_shapes=shapes), self.axis.size)
        self.terms |= mixed
        for t, s in zip(outs, made, strict=True):
            self.tag(t, s)


class FollowOps(Dispatch):
    """Tracks every operator of torch, except those inside of a call that counts as one operation."""

    def __init__(self, run: ShardingTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = meta_shapes.run_cached(func, args, kwargs)
        if func is torch.ops.aten.detach.default:
            # torch adds a detach if the result is still referenced, as it is here
            self.run.tag(out, self.run.state(args[0]))
        elif not self.run.quiet:
            self.run.done(func._schema.name.removeprefix("aten::"), args, kwargs, out, func=func)
        return out


class FollowCalls(TorchFunctionMode):
    """Tracks functions that count as one operation, whatever they consist of."""

    def __init__(self, run: ShardingTracker) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = UNITS.get(func)
        if name is None or self.run.quiet:
            return func(*args, **(kwargs or {}))
        self._needs(name, args)
        self.run.quiet += 1
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.run.quiet -= 1
        self.run.done(name, args, kwargs or {}, out)
        return out

    def _needs(self, name: str, args: Any) -> None:
        """Refuses, with a cure, a layer that mixes the split last dim."""
        at = self.run.where[-1]
        x = next((a for a in args if isinstance(a, Tensor)), None)
        if x is None or self.run.axis is None or at not in self.run.layers:
            return
        if self.run.state(x).cut != x.dim() - 1:
            return

        refuse_cut_features(name, at, x.dim())
