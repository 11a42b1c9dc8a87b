"""Rules of views and factories."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from launcher.extras.device_matrix.op_graph import Ref
from launcher.extras.device_matrix.op_rule import Letters
from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    Shape,
    broadcast,
    lettered,
    uncut_letters,
    without,
)


def reshape(call: OperatorCall) -> Lettering:
    """The outermost of dims that are merged or split stays the outermost of the resulting dims."""
    if call.node.op == "view.dtype" or 0 in call.outs[0]:
        return None
    source, out = call.ins[0], call.outs[0]
    before, after = [""] * len(source), [""] * len(out)
    for i, (a, b) in enumerate(merged(source, out)):
        before[a] = after[b] = f"d{i}"
    like = [tuple(after)] * (len(call.ins) - 1)
    return LetteredCall([tuple(before), *like], [tuple(after)])


def merged(source: Shape, out: Shape) -> Iterator[tuple[int, int]]:
    """Yields the outermost dims of each smallest group of dims with equal numbers of elements, in pairs."""
    a = [d for d, n in enumerate(source) if n != 1]
    b = [d for d, n in enumerate(out) if n != 1]
    while a and b:
        i = j = 1
        while (left := prod(source[d] for d in a[:i])) != (right := prod(out[d] for d in b[:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield a[0], b[0]
        del a[:i], b[:j]


def permuted(order: tuple[int, ...]) -> Lettering:
    letters = lettered(len(order))
    return LetteredCall([letters], [tuple(letters[d] for d in order)])


def permute(call: OperatorCall) -> Lettering:
    count = len(call.ins[0])
    return permuted(tuple(d % count for d in call.integers(1, "dims")))


def transpose(call: OperatorCall) -> Lettering:
    order = list(range(len(call.ins[0])))
    if order:
        a, b = call.dim(1, "dim0"), call.dim(2, "dim1")
        order[a], order[b] = order[b], order[a]
    return permuted(tuple(order))


def matrix_transpose(call: OperatorCall) -> Lettering:
    """t, mT, mH, adjoint: swaps the last two dims."""
    order = list(range(len(call.ins[0])))
    return permuted((*order[:-2], *reversed(order[-2:])))


def reverse(call: OperatorCall) -> Lettering:
    return permuted(tuple(reversed(range(len(call.ins[0])))))


def movedim(call: OperatorCall) -> Lettering:
    count = len(call.ins[0])
    source = [d % count for d in call.integers(1, "source")]
    target = [d % count for d in call.integers(2, "destination")]
    rest = iter(d for d in range(count) if d not in source)
    return permuted(tuple(source[target.index(d)] if d in target else next(rest) for d in range(count)))


def expand(call: OperatorCall) -> Lettering:
    """An expanded dim, which exists once in memory, may be cut in the output only."""
    out = call.outs[0]
    letters = lettered(len(out))
    like = [letters] * (len(call.ins) - 1)
    return LetteredCall([broadcast(call.ins[0], out, letters), *like], [letters])


def broadcast_tensors(call: OperatorCall) -> Lettering:
    out = call.outs[0]
    letters = lettered(len(out))
    return LetteredCall([broadcast(shape, out, letters) for shape in call.ins], [letters] * len(call.outs))


def repeat(call: OperatorCall) -> Lettering:
    """repeat and tile: dims that are not repeated may be cut."""
    out, source = call.outs[0], call.ins[0]
    letters = lettered(len(out))
    lead = len(out) - len(source)
    kept = without(letters, *range(lead), *(lead + d for d, n in enumerate(source) if n != out[lead + d]))
    return LetteredCall([kept[lead:]], [kept])


def repeat_interleave(call: OperatorCall) -> Lettering:
    """With a number of repeats, the copies of an element are consecutive, so a cut stays valid."""
    if isinstance(call.arg(1, "repeats"), Ref) or call.arg(2, "dim") is None:
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters])


def without_dim(call: OperatorCall) -> Lettering:
    """cumsum and other running operations: all dims but one may be cut."""
    return uncut_along(call, call.dim(1, "dim", 0))


def uncut_along(call: OperatorCall, *dims: int) -> LetteredCall:
    """``dims`` of all tensors are not cut, whether or not their sizes change."""
    letters = without(lettered(len(call.ins[0])), *dims)
    return LetteredCall([letters] * len(call.ins), [letters] * len(call.outs))


def along_last(call: OperatorCall) -> Lettering:
    """topk, sort: ``dim``, by default the last one, is not cut."""
    place = 2 if call.node.kind == "topk" else 1
    if call.node.op in ("sort.stable", "argsort.stable"):
        place = 2
    return uncut_along(call, call.dim(place, "dim", -1))


def roll(call: OperatorCall) -> Lettering:
    """Without dims the flattened tensor is rolled, so no dim is cut."""
    return uncut_along(call, *call.dims(2, "dims"))


def flip(call: OperatorCall) -> Lettering:
    return uncut_along(call, *call.dims(1, "dims"))


def piece(call: OperatorCall) -> Lettering:
    """slice, narrow: the dim may be cut if all of it is taken."""
    dim = call.dim(1, "dim", 0)
    if call.ins[0] == call.outs[0] and call.integer(4, "step", 1) == 1:
        letters = lettered(len(call.ins[0]))
        return LetteredCall([letters], [letters])
    return uncut_along(call, dim)


def select(call: OperatorCall) -> Lettering:
    """select and unbind: one dim is removed."""
    dim = call.dim(1, "dim", 0)
    letters = without(lettered(len(call.ins[0])), dim)
    return LetteredCall([letters], [_dropped(letters, dim)] * len(call.outs))


def _dropped(letters: Letters, dim: int) -> Letters:
    return letters[:dim] + letters[dim + 1 :]


def split(call: OperatorCall) -> Lettering:
    """split, chunk and tensor_split: the dim that is split is not cut."""
    return uncut_along(call, call.dim(2, "dim", 0))


def cat(call: OperatorCall) -> Lettering:
    dims = len(call.outs[0])
    letters = without(lettered(dims), call.dim(1, "dim", 0, dims))
    empty = [shape == (0,) and dims != 1 for shape in call.ins]  # torch joins these to anything
    return LetteredCall([("",) if e else letters for e in empty], [letters])


def stack(call: OperatorCall) -> Lettering:
    dims = len(call.outs[0])
    dim = call.dim(1, "dim", 0, dims)
    letters = without(lettered(dims), dim)
    return LetteredCall([_dropped(letters, dim)] * len(call.ins), [letters])


def scatter_piece(call: OperatorCall) -> Lettering:
    """slice_scatter, select_scatter: the dim that is written to is not cut."""
    dim = call.dim(2, "dim", 0)
    letters = without(lettered(len(call.ins[0])), dim)
    piece = letters if call.node.kind == "slice_scatter" else _dropped(letters, dim)
    return LetteredCall([letters, piece], [letters])


def windows(call: OperatorCall) -> Lettering:
    """unfold: the windows along an uncut dim become a new last dim."""
    letters = without(lettered(len(call.ins[0])), call.dim(1, "dimension"))
    return LetteredCall([letters], [(*letters, "")]) if letters else None


def joined_columns(call: OperatorCall) -> Lettering:
    """hstack: joins along dim 1; vectors along dim 0."""
    dims = len(call.outs[0])
    if len({len(shape) for shape in call.ins}) > 1 or len(call.ins[0]) != dims:
        return None
    letters = without(lettered(dims), min(1, dims - 1))
    return LetteredCall([letters] * len(call.ins), [letters])


def pad(call: OperatorCall) -> Lettering:
    """Dims without padding may be cut."""
    source, pads = call.ins[0], call.integers(1, "pad")
    padded = [len(source) - 1 - i // 2 for i, n in enumerate(pads) if n]
    if call.node.kind not in ("pad", "constant_pad_nd") or call.arg(2, "mode", "constant") != "constant":
        padded = [len(source) - 1 - i for i in range(len(pads) // 2)]
    return uncut_along(call, *padded)


def diagonal(call: OperatorCall) -> Lettering:
    count = len(call.ins[0])
    gone = call.dim(2, "dim1", 0), call.dim(3, "dim2", 1)
    letters = without(lettered(count), *gone)
    return LetteredCall([letters], [(*(x for d, x in enumerate(letters) if d not in gone), "")])


def meshgrid(call: OperatorCall) -> Lettering:
    """Each input is a dim of all outputs."""
    letters = list(lettered(len(call.ins)))
    if any(len(shape) != 1 for shape in call.ins):
        return None
    ins: list[Letters] = [(x,) for x in letters]
    if call.node.kwarg("indexing", "ij") == "xy" and len(letters) > 1:
        letters[:2] = letters[1::-1]
    return LetteredCall(ins, [tuple(letters)] * len(call.outs))


def channel_blocks(call: OperatorCall) -> Lettering:
    """pixel_shuffle, unfold, fold: the batch and the outermost part of channels; spatial dims are not cut."""
    lead = len(call.ins[0]) - (3 if call.node.kind.startswith("pixel") else 2)
    if call.node.kind in ("im2col", "pixel_unshuffle"):
        lead = len(call.ins[0]) - 3
    batch = lettered(lead)
    out = len(call.outs[0]) - lead - 1
    return LetteredCall([(*batch, "c", *[""] * (len(call.ins[0]) - lead - 1))], [(*batch, "c", *[""] * out)])


def filled(call: OperatorCall) -> Lettering:
    """zeros, ones, full: each rank makes its own part; new_zeros(x) uses nothing of x but its dtype."""
    ins = [lettered(len(shape), f"x{i}_") for i, shape in enumerate(call.ins)]
    return LetteredCall(ins, [lettered(len(call.outs[0]))])


def counted(call: OperatorCall) -> Lettering:
    """arange, eye, rand and others: small tensors, so every rank makes the full tensor."""
    return LetteredCall(uncut_letters(call.ins), uncut_letters(call.outs))


def drawn(call: OperatorCall) -> Lettering:
    """Every rank draws the full tensor, whose numbers depend only on its shape, and uses its part."""
    if call.node.op not in (
        "bernoulli.p",
        "rand_like",
        "randn_like",
        "randint_like",
        "randint_like.low_dtype",
    ):
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters], kernel="drawn")


def feature_dropout(call: OperatorCall) -> Lettering:
    """There is one draw for each channel of each sample."""
    if len(call.ins[0]) < 2:
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters], kernel="feature_dropout")


def dropout(call: OperatorCall) -> Lettering:
    """Every rank draws the mask of the full tensor and uses its part of it."""
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters] * len(call.outs), kernel="dropout")
