"""Rules of lookups: embeddings, indices, gather and scatter."""

from __future__ import annotations

from launcher.extras.device_matrix.op_graph import Ref
from launcher.extras.device_matrix.op_rule import Letters
from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    broadcast,
    lettered,
    without,
)


def embedding(call: OperatorCall) -> Lettering:
    """If the vocabulary is cut, each rank looks up its own rows and has zeros for others: terms of a sum."""
    if call.arg(3, "scale_grad_by_freq", False) is True or call.arg(4, "sparse", False) is True:
        return None
    rows = lettered(len(call.ins[1]))
    return LetteredCall([("v", "h"), rows], [(*rows, "h")], sums=("v",), kernel="embedding")


def index_select(call: OperatorCall) -> Lettering:
    letters, dim = lettered(len(call.ins[0])), call.dim(1, "dim")
    if not letters:
        return None
    picked: Letters = ("i",) * len(call.ins[1])
    out = (*letters[:dim], "i", *letters[dim + 1 :])
    return LetteredCall([without(letters, dim), picked], [out])


def gather(call: OperatorCall) -> Lettering:
    """The indexed dim is not cut; another dim may be cut if the index has its full size."""
    source, index = call.ins
    if len(source) != len(index):
        return None
    letters = lettered(len(source))
    dim = call.dim(2, "dim", 0) if call.node.kind == "take_along_dim" else call.dim(1, "dim", 0)
    unlike = [d for d, n in enumerate(source) if d != dim and n != index[d]]
    kept = without(letters, *unlike)
    out = kept
    if call.outs[0] != index:  # take_along_dim broadcasts
        return None
    return LetteredCall([without(kept, dim), out], [out])


def index(call: OperatorCall) -> Lettering:
    """``x[:, i, j]``: the indices are broadcast to each other; dims without an index may be cut."""
    indices = call.arg(1, "indices")
    if not isinstance(indices, tuple):
        return None
    values = [call.graph.values[i.value] for i in indices if isinstance(i, Ref)]
    if any(v.spec.dtype in ("bool", "uint8") for v in values):
        return None

    # Adjacent indexed dims are replaced in place; otherwise their result comes first.
    source = call.ins[0]
    at = [d for d, i in enumerate(indices) if isinstance(i, Ref)]
    letters = without(lettered(len(source)), *at)
    kept = [d for d in range(len(source)) if d not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    width = len(call.outs[0]) - len(kept)
    picked = lettered(width, "i")
    picked_shape = call.outs[0][first : first + width]
    out = (*(letters[d] for d in kept[:first]), *picked, *(letters[d] for d in kept[first:]))
    ins = [letters, *(broadcast(v.shape, picked_shape, picked) for v in values)]
    return LetteredCall(ins, [out])


def scatter(call: OperatorCall) -> Lettering:
    """scatter and its variants: the indexed dim is not cut; others may be if the index has all of them."""
    target, *others = call.ins
    dim = call.dim(1, "dim")
    if any(len(shape) != len(target) for shape in others if shape) or not target:
        return None
    unlike = [d for d, n in enumerate(target) for shape in others if shape and shape[d] != n]
    letters = without(lettered(len(target)), dim, *unlike)
    return LetteredCall([letters, *(letters if shape else () for shape in others)], [letters])


def index_add(call: OperatorCall) -> Lettering:
    """index_add, index_copy and index_fill: the indexed dim is not cut."""
    if not call.ins[0]:
        return None
    dim = call.dim(1, "dim")
    letters = without(lettered(len(call.ins[0])), dim)
    source = [letters if shape else () for shape in call.ins[2:]]
    return LetteredCall([letters, ("",) * len(call.ins[1]), *source], [letters])


def one_hot(call: OperatorCall) -> Lettering:
    if call.integer(1, "num_classes", -1) < 0:
        return None
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [(*letters, "")])
