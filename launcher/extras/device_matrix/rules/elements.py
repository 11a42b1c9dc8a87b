"""Rules of elementwise operators and lookups."""

from __future__ import annotations

from launcher.extras.device_matrix.op_graph import Letters, Ref
from launcher.extras.device_matrix.rules.calls import (
    LetteredCall,
    Lettering,
    OperatorCall,
    broadcast,
    lettered,
    without,
)

UNARY = (
    "abs acos acosh alias angle asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min clip clone "
    "conj contiguous cos cosh deg2rad detach digamma elu erf erfc erfinv exp exp2 expm1 float_power fill "
    "floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf "
    "leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg "
    "negative positive rad2deg reciprocal relu relu6 round rsqrt selu celu sgn sigmoid sign signbit silu sin "
    "sinc sinh softplus softshrink special_expit sqrt square tan tanh threshold to trunc fix zero type_as "
    "_to_copy _cast_Float _cast_Double _cast_Half absolute arccos arcsin arctan special_erf special_expm1 "
    "special_log1p real imag resolve_conj resolve_neg lift_fresh_copy"
)
BINARY = (
    "add sub mul div true_divide divide multiply subtract rsub floor_divide remainder fmod pow atan2 "
    "maximum minimum fmax fmin eq ne gt ge lt le greater less greater_equal less_equal not_equal logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "__and__ __or__ __xor__ __lshift__ __rshift__ hypot copysign nextafter ldexp logaddexp logaddexp2 xlogy "
    "special_xlogy gcd lcm heaviside isclose copy arctan2 polar complex"
)
TERNARY = "where masked_fill lerp addcmul addcdiv"
LIKE = "zeros_like ones_like full_like empty_like"
KINDS = tuple(dict.fromkeys((UNARY + " " + BINARY + " " + TERNARY + " " + LIKE).split()))


def elementwise(call: OperatorCall) -> Lettering:
    """The inputs are broadcast to the output, so all dims of the output may be cut."""
    if len(call.outs) != 1:
        return None
    out = call.outs[0]
    letters = lettered(len(out))
    return LetteredCall([broadcast(shape, out, letters) for shape in call.ins], [letters])


def prelu(call: OperatorCall) -> Lettering:
    """There is one weight per channel (dim 1), or one for all."""
    letters = lettered(len(call.ins[0]))
    channels = letters[1] if len(letters) > 1 and call.ins[1] != (1,) else ""
    return LetteredCall([letters, (channels,) * len(call.ins[1])], [letters])


def triangle(call: OperatorCall) -> Lettering:
    """Both dims may be cut: the diagonal of a rank is shifted by the offset of its part."""
    letters = lettered(len(call.ins[0]))
    return LetteredCall([letters], [letters])


def as_complex(call: OperatorCall) -> Lettering:
    """Real and imaginary parts are a separate last dim, which stays whole."""
    letters = lettered(max(len(call.ins[0]), len(call.outs[0])))
    letters = (*letters[:-1], "")
    return LetteredCall([letters[: len(call.ins[0])]], [letters[: len(call.outs[0])]])


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
    """The indexed dim stays whole; another dim may be cut if the index has its full size."""
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

    # Indexed dims that are neighbours are replaced in place; otherwise their result comes first.
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
    """scatter and its variants: the indexed dim stays whole; others may be cut if the index has them all."""
    target, *others = call.ins
    dim = call.dim(1, "dim")
    if any(len(shape) != len(target) for shape in others if shape) or not target:
        return None
    unlike = [d for d, n in enumerate(target) for shape in others if shape and shape[d] != n]
    letters = without(lettered(len(target)), dim, *unlike)
    return LetteredCall([letters, *(letters if shape else () for shape in others)], [letters])


def index_add(call: OperatorCall) -> Lettering:
    """index_add, index_copy and index_fill: the indexed dim stays whole."""
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
