"""Rules for operations on sharded tensors: how the result is split, and whether it is correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import Any

import torch

from launcher.plan.tensor_parallel.module_strategies import KEY, Cut
from launcher.plan.tensor_parallel.strategy_reader import axes_text

Shape = tuple[int, ...]

SAME = frozenset({"alias", "clone", "contiguous", "copy_", "detach", "_to_copy", "lift_fresh"})
NEW = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})
LIKE = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
MOVES = frozenset({"expand", "permute", "squeeze", "t", "transpose", "unsqueeze"})
VIEWS = frozenset({"_unsafe_view", "reshape", "view"})
ALONG = {
    "cat": 1, "flip": 1, "select": 1, "slice": 1, "split": 2, "split_with_sizes": 2, "unbind": 1,
    "_softmax": 1, "_log_softmax": 1, "cumsum": 1, "sort": 1, "topk": 2, "index_select": 1,
    "amax": 1, "amin": 1, "any": 1, "all": 1, "argmax": 1, "logsumexp": 1, "max": 1, "mean": 1, "min": 1,
    "norm": 2, "linalg_vector_norm": 2, "prod": 1, "std": 1, "sum": 1, "var": 1, "var_mean": 1,
}  # fmt: skip
"""Operations that mix values along dims, with the position of the dims argument (absent: all dims)."""


class CutRefused(Exception):
    """Raised if the results would be wrong. ``key`` and ``cure`` are those of ``Problem``."""

    def __init__(self, text: str, key: str = "", cure: str = "") -> None:
        super().__init__(text)
        self.key = key
        self.cure = cure


@dataclass(frozen=True)
class CutState:
    """How a tensor is split, and where it comes from.

    ``cut`` is the dim of which this rank has a part. For a full tensor, ``made`` names the parameters and
    operators (``name()``) that it was computed from; it is empty if no gradient flows back.
    """

    cut: Cut = None
    made: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OpInput:
    """One tensor that goes into an operation."""

    shape: Shape
    state: CutState
    floating: bool


@dataclass(frozen=True)
class OpCall:
    """One operation as it was called; ``op`` is torch's operator, if it is one.

    ``here`` and ``full_shapes`` have the shapes of its results on this rank, and in the full model.
    """

    name: str
    op: Any
    args: Sequence[Any]
    inputs: Sequence[OpInput]
    here: Sequence[Shape]
    full_shapes: Sequence[Shape]

    def tagged(self, tag: torch.Tag) -> bool:
        return self.op is not None and tag in self.op.tags

    @property
    def source(self) -> OpInput:
        """The first input that is split."""
        return next(g for g in self.inputs if g.state.cut is not None)

    @property
    def dim(self) -> int:
        """The dim on which the first split input is split."""
        dim = self.source.state.cut
        assert dim is not None
        return dim

    @property
    def ndim(self) -> int:
        """The number of dims of the first split input."""
        return len(self.source.shape)


def after(call: OpCall, tp: int) -> tuple[list[CutState], set[str]]:
    """Returns each result's state, and the parameters whose gradient becomes a term of the sum over ranks.

    Raises ``CutRefused``.
    """
    if call.tagged(torch.Tag.nondeterministic_seeded):
        raise CutRefused(f"{call.name} draws random numbers, which would differ between the ranks of tp")

    # no input is split
    pairs = list(zip(call.here, call.full_shapes, strict=True))
    fresh = call.name in NEW and all(here == full for here, full in pairs)
    if fresh or all(g.state.cut is None for g in call.inputs):
        return _uncut(call, pairs), set()

    # how its results are split, and whether they are correct
    states = [CutState(_cut_dim(call.name, here, full, tp)) for here, full in pairs]
    _check_rule(call)

    # other full tensors get a term of their gradient on each rank
    made = {m for g in call.inputs if g.state.cut is None and g.floating for m in g.state.made}
    mixed = sorted(m for m in made if m.endswith("()"))
    if mixed:
        raise CutRefused(f"{call.name} mixes a tensor cut over tp with the full output of {mixed[0][:-2]}")
    return states, made


def _uncut(call: OpCall, pairs: Sequence[tuple[Shape, Shape]]) -> list[CutState]:
    """Returns the states of full results."""
    for here, full in pairs:
        if here != full:
            text = f"{call.name} makes a tensor of {list(here)} where the full model has {list(full)}"
            raise CutRefused(f"{text}: its size comes from a tensor cut over tp")
    made = frozenset(m for g in call.inputs if g.floating and call.name not in NEW for m in g.state.made)
    return [CutState(None, made) for _ in pairs]


def _cut_dim(name: str, here: Shape, full: Shape, tp: int) -> int:
    """Returns the dim of ``full`` of which ``here`` is the part of one rank of ``tp``."""
    differ = [d for d, (a, b) in enumerate(zip(here, full, strict=False)) if a != b]
    if len(here) != len(full) or len(differ) != 1 or here[differ[0]] * tp != full[differ[0]]:
        made = f"{name} of a tensor cut over tp has shape {list(here)}"
        raise CutRefused(f"{made}, which is not one rank's part of the full model's shape {list(full)}")
    return differ[0]


def _check_rule(call: OpCall) -> None:
    """Refuses an operation that needs the other ranks' parts, or that would join them in another order."""
    if call.name in RULES:
        good = RULES[call.name](call)
    elif call.tagged(torch.Tag.pointwise):
        good = _aligned(call)
    else:
        text = f"{call.name} of a tensor cut over tp on dim {call.dim}"
        raise CutRefused(f"{text} is not known to work part by part")
    if not good:
        raise CutRefused(f"{call.name} needs all of dim {call.dim}, but a rank of tp has only a part of it")


def refuse_cut_features(name: str, module: str, dims: int) -> None:
    """Refuses, with a cure, an input that is cut on its features if the layer needs all of them.

    Its error would show only a shape. ``dims``: the number of dims of the input.
    """
    text = f"{module} needs all features of its input, which arrives cut over tp"
    if name == "linear":
        cure = quote(f"{KEY}.{module}.weight=[null, tp]")
        raise CutRefused(f"{text}; cut its weight on the features too", KEY, cure)
    if name in ("layer_norm", "rms_norm"):
        cure = quote(f"{KEY}.{module}.input={axes_text(((),) * dims)}")
        raise CutRefused(f"{text}; gather them before the layer", KEY, cure)


def _always(call: OpCall) -> bool:
    return True


def _leading(call: OpCall) -> bool:
    """Returns true if equally many elements precede the split dim in the input and in the output.

    A dim that leads the dims with which it is merged, or into which it is split, keeps its order over the
    ranks.
    """
    shape = call.full_shapes[0]
    dim = next(d for d, size in enumerate(call.here[0]) if size != shape[d])
    return prod(call.source.shape[: call.dim]) == prod(shape[:dim])


def _along(call: OpCall) -> bool:
    """Returns true if the operation works along other dims than the split one."""
    return call.dim not in _dims(call.args, ALONG[call.name], call.ndim) and _alike(call)


def _alike(call: OpCall) -> bool:
    """Returns true if all inputs are split on the same dim."""
    return len({g.state.cut for g in call.inputs}) == 1


def _attention(call: OpCall) -> bool:
    """Returns true if query, key and value have the same split, on batch or heads, and share one mask."""
    if len({g.state.cut for g in call.inputs[:3]}) > 1 or call.dim >= call.ndim - 2:
        return False
    return all(g.state.cut is None and _same_along(g, call.dim - call.ndim) for g in call.inputs[3:])


def _norm(call: OpCall) -> bool:
    """Returns true if the normalized dims and the weights are full."""
    return call.dim < call.ndim - len(call.args[1]) and all(g.state.cut is None for g in call.inputs[1:])


def _linear(call: OpCall) -> bool:
    """Returns true if the features and the weights are full."""
    return _first_alone(call) and call.dim < call.ndim - 1


def _first_alone(call: OpCall) -> bool:
    """Returns true if only the first input is split."""
    first, *others = call.inputs
    return first.state.cut is not None and all(g.state.cut is None for g in others)


def _batches(call: OpCall) -> bool:
    """Returns true if the matrices, which are the last two dims, are full."""
    return call.dim < call.ndim - 2


def _repeat(call: OpCall) -> bool:
    """Returns true if each element is repeated equally often, along one given dim."""
    return _first_alone(call) and len(call.args) > 2 and isinstance(call.args[1], int)


def _product(call: OpCall) -> bool:
    """Returns true if both factors split batches equally, or only the first has one, also of rows."""
    a, b = call.inputs[:2]
    if a.state.cut is None or len(call.inputs) > 2:
        return False
    if b.state.cut is None:
        return a.state.cut == len(a.shape) - 2 or (a.state.cut < len(a.shape) - 1 and len(b.shape) == 2)
    return len(a.shape) == len(b.shape) and a.state.cut == b.state.cut < len(a.shape) - 2


def _aligned(call: OpCall) -> bool:
    """Returns true if all split inputs are split on one dim, and full inputs are broadcast along it."""
    from_end = {g.state.cut - len(g.shape) for g in call.inputs if g.state.cut is not None}
    if len(from_end) > 1:
        return False
    at = from_end.pop()
    return all(g.state.cut is not None or _same_along(g, at) for g in call.inputs)


def _same_along(g: OpInput, at: int) -> bool:
    """Returns true if a tensor is the same for all indices of dim ``at``, counted from the end."""
    return len(g.shape) < -at or g.shape[at] == 1


def _dims(args: Sequence[Any], place: int, ndim: int) -> set[int]:
    """Returns the dims that an operation works along."""
    requested = args[place] if len(args) > place else None
    if requested is None or requested == []:
        return set(range(ndim))
    dims = requested if isinstance(requested, list | tuple) else [requested]
    return {d % ndim for d in dims}


RULES: dict[str, Callable[[OpCall], bool]] = {
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(SAME | LIKE | MOVES, _always),
    **dict.fromkeys(VIEWS, _leading),
    "attention": _attention,
    "bmm": _product,
    "embedding": _first_alone,
    "layer_norm": _norm,
    "linear": _linear,
    "matmul": _product,
    "mm": _product,
    "repeat": _repeat,
    "rms_norm": _norm,
    "stack": _alike,
    "tril": _batches,
    "triu": _batches,
}
"""For each operation, the rule that returns true if the operation is correct on each rank's part alone.

Operations that are neither listed nor pointwise are refused.
"""


OpRow = tuple[str, tuple[tuple[int, ...], ...]]
