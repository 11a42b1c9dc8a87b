"""Arguments of an operator for the parts of one rank: sizes, numbers of groups, places of diagonals."""

from __future__ import annotations

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.plan.sharding.op_graph import Arg

SIZED = {
    "view", "reshape", "_unsafe_view", "unflatten", "expand", "broadcast_to",
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
"""Kinds with a list of sizes, which are those of their output."""
RESHAPES = {"view", "reshape", "_unsafe_view", "unflatten", "squeeze"}
END = 2**63 - 1


def local_arguments(call: LocalCall) -> tuple[str, tuple[Arg, ...]]:
    """Return the operator to run, and its positional arguments."""
    op, kind, args = call.node.op, call.node.kind, call.node.args
    if op == "view.dtype":
        return op, args
    if kind in RESHAPES:
        # a part need not be contiguous, and squeeze must keep a dim of which one element is on this rank
        return "reshape", (args[0], call.local_outs[0])
    if kind in SIZED:
        place = 0 if not call.node.ins else 1
        return op, replaced(args, place, call.local_outs[0])
    if kind in ("slice", "narrow") and call.ins == call.outs:
        return "slice.Tensor", (args[0], 0, 0, END, 1)
    if kind == "group_norm":
        return op, _divided(args, 1, call.ways("c"))
    if kind.startswith("conv") and len(args) > 6:
        return op, _divided(args, 6, call.ways("g"))
    if kind in ("triu", "tril"):
        return op, (args[0], _diagonal(call))
    if kind == "repeat_interleave":
        return op, args[:3]
    return op, args


def replaced(args: tuple[Arg, ...], place: int, value: Arg) -> tuple[Arg, ...]:
    return (*args[:place], value, *args[place + 1 :])


def _divided(args: tuple[Arg, ...], place: int, ways: int) -> tuple[Arg, ...]:
    number = args[place]
    assert isinstance(number, int)
    return replaced(args, place, number // ways)


def _diagonal(call: LocalCall) -> int:
    """Return the diagonal in the part, whose (i, j) is (i + rows before, j + columns before) in the whole."""
    given = call.node.args[1] if len(call.node.args) > 1 else 0
    rows, columns = call.rule.outs[0][-2:]
    height, width = call.local_outs[0][-2:]
    assert isinstance(given, int)
    return given + call.part(rows) * height - call.part(columns) * width
