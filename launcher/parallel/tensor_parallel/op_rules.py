"""What each operation makes of tensors of which a rank has a part: the same part of the result, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.plan.operators.resolve import Cut

Shape = tuple[int, ...]

UNITS: dict[Any, str] = {
    F.linear: "linear", F.embedding: "embedding", F.layer_norm: "layer_norm", F.rms_norm: "rms_norm",
    F.scaled_dot_product_attention: "attention", torch.matmul: "matmul", Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul", torch.reshape: "reshape", Tensor.reshape: "reshape", torch.flatten: "reshape",
    Tensor.flatten: "reshape", Tensor.contiguous: "contiguous", torch.repeat_interleave: "repeat",
    Tensor.repeat_interleave: "repeat",
}  # fmt: skip
"""Functions that are one operation here, whatever torch makes them of."""

SAME = frozenset({"alias", "clone", "contiguous", "copy_", "detach", "_to_copy", "lift_fresh"})
NEW = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})
LIKE = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
MOVES = frozenset({"expand", "permute", "squeeze", "t", "transpose", "unsqueeze"})
VIEWS = frozenset({"_unsafe_view", "reshape", "view"})
ALONG = {
    "cat": 1, "flip": 1, "select": 1, "slice": 1, "split": 2, "split_with_sizes": 2, "unbind": 1,
    "_softmax": 1, "_log_softmax": 1, "cumsum": 1, "sort": 1, "topk": 2, "index_select": 1,
    "amax": 1, "amin": 1, "any": 1, "all": 1, "argmax": 1, "logsumexp": 1, "max": 1, "mean": 1, "min": 1, "norm": 2,
    "linalg_vector_norm": 2, "prod": 1, "std": 1, "sum": 1, "var": 1, "var_mean": 1,
}  # fmt: skip
"""Operations that mix numbers along one dim or some, which is the argument at this place (all, where it is absent)."""


class Refused(Exception):
    """The numbers would not be right. ``key`` and ``cure`` as in ``Problem``."""

    def __init__(self, text: str, key: str = "", cure: str = "") -> None:
        super().__init__(text)
        self.key, self.cure = key, cure


@dataclass(frozen=True)
class State:
    """``cut``: the dim of which this rank has a part. Of a whole tensor ``made`` names the parameters that it is made
    of, and the operators (``name()``); nothing when no gradient goes back from it.
    """

    cut: Cut = None
    made: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Given:
    """One tensor that goes into an operation."""

    shape: Shape
    state: State
    floating: bool


def after(
    name: str,
    op: Any,
    args: Sequence[Any],
    given: Sequence[Given],
    outs: Sequence[Shape],
    whole: Sequence[Shape],
    n: int,
) -> tuple[list[State], set[str]]:
    """The state of each result, and the parameters whose gradient becomes a term of the sum over the ranks.

    ``whole`` are the shapes of the same results in the whole model. Raises ``Refused``.
    """
    if op is not None and torch.Tag.nondeterministic_seeded in op.tags:
        raise Refused(f"{name} draws random numbers, which the ranks of tp would not draw alike")
    fresh = name in NEW and all(a == b for a, b in zip(outs, whole, strict=True))
    if fresh or all(g.state.cut is None for g in given):
        return _whole(name, given, outs, whole), set()
    states = [State(_where(name, out, full, n)) for out, full in zip(outs, whole, strict=True)]
    source = next(g for g in given if g.state.cut is not None)
    leads = prod(source.shape[: source.state.cut]) == prod(whole[0][: states[0].cut])
    _legal(name, op, args, given, leads)
    made = {m for g in given if g.state.cut is None and g.floating for m in g.state.made}
    if mixed := sorted(m for m in made if m.endswith("()")):
        raise Refused(f"{name} mixes what is cut over tp with the whole output of {mixed[0][:-2]}")
    return states, made


def _whole(name: str, given: Sequence[Given], outs: Sequence[Shape], whole: Sequence[Shape]) -> list[State]:
    for out, full in zip(outs, whole, strict=True):
        if out != full:
            raise Refused(f"{name} makes a tensor of {list(out)} where the whole model has {list(full)}: its size "
                          "comes from what is cut over tp")  # fmt: skip
    made = frozenset(m for g in given if g.floating and name not in NEW for m in g.state.made)
    return [State(None, made) for _ in outs]


def _where(name: str, out: Shape, full: Shape, n: int) -> int:
    """The dim of which ``out`` is the part."""
    off = [d for d, (a, b) in enumerate(zip(out, full, strict=False)) if a != b]
    if len(out) != len(full) or len(off) != 1 or out[off[0]] * n != full[off[0]]:
        raise Refused(
            f"{name} of what is cut over tp makes {list(out)}, no part of the {list(full)} of the whole model"
        )
    return off[0]


def _legal(name: str, op: Any, args: Sequence[Any], given: Sequence[Given], leads: bool) -> None:
    """Refuse an operation that would need the other ranks' parts, or put them together in another order.

    ``leads``: as many numbers are before the cut dim of what goes in as before that of what comes out.
    """
    cut = next(g for g in given if g.state.cut is not None)
    dim = cut.state.cut
    assert dim is not None
    if name in SAME | LIKE | MOVES:
        good = True
    elif name in VIEWS:  # a dim that leads what it is merged with, or split into, keeps its order over the ranks
        good = leads
    elif name in ALONG:
        good = dim not in _dims(args, ALONG[name], len(cut.shape)) and len({g.state.cut for g in given}) == 1
    elif name == "stack":
        good = len({g.state.cut for g in given}) == 1
    elif name == "attention":
        good = len({g.state.cut for g in given[:3]}) == 1 and dim < len(cut.shape) - 2
        good = good and all(g.state.cut is None and _spreads(g, dim - len(cut.shape)) for g in given[3:])
    elif name in ("layer_norm", "rms_norm"):
        good = dim < len(cut.shape) - len(args[1]) and all(g.state.cut is None for g in given[1:])
    elif name == "linear":
        good = given[0].state.cut is not None and dim < len(cut.shape) - 1 and _only_first(given)
    elif name == "embedding":
        good = given[0].state.cut is not None and _only_first(given)
    elif name in ("tril", "triu"):
        good = dim < len(cut.shape) - 2
    elif name == "repeat":
        good = _only_first(given) and len(args) > 2 and isinstance(args[1], int)
    elif name in ("matmul", "bmm", "mm"):
        good = _product(given)
    elif op is not None and torch.Tag.pointwise in op.tags:
        good = _aligned(given)
    else:
        raise Refused(f"{name} of a tensor cut over tp on dim {dim}: not known to work part by part")
    if not good:
        raise Refused(f"{name} needs all of dim {dim}, of which a rank of tp has a part")


def _only_first(given: Sequence[Given]) -> bool:
    return given[0].state.cut is not None and all(g.state.cut is None for g in given[1:])


def _dims(args: Sequence[Any], place: int, ndim: int) -> set[int]:
    """The dims that an operation works along."""
    given = args[place] if len(args) > place else None
    if given is None or given == []:
        return set(range(ndim))
    return {d % ndim for d in (given if isinstance(given, list | tuple) else [given])}


def _product(given: Sequence[Given]) -> bool:
    """Batches cut alike, or the rows of the first."""
    a, b = given[:2]
    if a.state.cut is None or len(given) > 2:
        return False
    if b.state.cut is None:
        return a.state.cut == len(a.shape) - 2 or (a.state.cut < len(a.shape) - 1 and len(b.shape) == 2)
    return len(a.shape) == len(b.shape) and a.state.cut == b.state.cut < len(a.shape) - 2


def _aligned(given: Sequence[Given]) -> bool:
    """Whether all that is cut is cut on one dim, and what is whole is spread along it."""
    from_end = {g.state.cut - len(g.shape) for g in given if g.state.cut is not None}
    if len(from_end) > 1:
        return False
    at = from_end.pop()
    return all(g.state.cut is not None or _spreads(g, at) for g in given)


def _spreads(g: Given, at: int) -> bool:
    """Whether a tensor is the same for all that is cut on this dim, counted from the end."""
    return len(g.shape) < -at or g.shape[at] == 1
