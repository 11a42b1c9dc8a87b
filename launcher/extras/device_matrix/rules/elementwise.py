"""Rules of elementwise operators."""

from __future__ import annotations

from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    broadcast,
    lettered,
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
    """Real and imaginary parts are a separate last dim, which is not cut."""
    letters = lettered(max(len(call.ins[0]), len(call.outs[0])))
    letters = (*letters[:-1], "")
    return LetteredCall([letters[: len(call.ins[0])]], [letters[: len(call.outs[0])]])
