"""Rules of matrix products: a contracted letter makes terms of a sum; a bias is added to one of them."""

from __future__ import annotations

from launcher.plan.sharding.op_rule import Letters
from launcher.plan.sharding.rules.operator_call import (
    LetteredCall,
    OperatorCall,
    Said,
    Shape,
    broadcast,
    lettered,
)

ONCE = "bias_once"


def linear(call: OperatorCall) -> Said:
    batch = lettered(len(call.ins[0]) - 1)
    n = () if len(call.ins[1]) == 1 else ("n",)
    bias = [("n",)] if len(call.ins) == 3 else []
    return LetteredCall([(*batch, "k"), (*n, "k"), *bias], [(*batch, *n)], sums=("k",), kernel=ONCE)


def matmul(call: OperatorCall) -> Said:
    """matmul, mm, bmm, mv and dot: a product of the last two dims; the dims before them are broadcast."""
    a, b = call.ins
    m: Letters = ("m",) if len(a) > 1 else ()
    n: Letters = ("n",) if len(b) > 1 else ()
    out = call.outs[0]
    batch = lettered(len(out) - len(m) - len(n))
    before = out[: len(batch)]
    left = (*broadcast(a[:-2], before, batch), *m, "k")
    right = (*broadcast(b[:-2], before, batch), "k", *n)
    return LetteredCall([left, right], [(*batch, *m, *n)], sums=("k",))


def addmm(call: OperatorCall) -> Said:
    """addmm, baddbmm and addmv: ``bias + a @ b``."""
    batch = lettered(len(call.ins[1]) - 2)
    n: Letters = ("n",) if len(call.ins[2]) > len(batch) + 1 else ()
    out = (*batch, "m", *n)
    bias = broadcast(call.ins[0], call.outs[0], out)
    return LetteredCall([bias, (*batch, "m", "k"), (*batch, "k", *n)], [out], sums=("k",), kernel=ONCE)


def outer(call: OperatorCall) -> Said:
    return LetteredCall([("m",), ("n",)], [("m", "n")])


def bilinear(call: OperatorCall) -> Said:
    """``[.., i], [.., j], [o, i, j] -> [.., o]``."""
    batch = lettered(len(call.ins[0]) - 1)
    ins: list[Letters] = [(*batch, "i"), (*batch, "j"), ("o", "i", "j")]
    if len(call.ins) == 4:
        ins.append(("o",))
    return LetteredCall(ins, [(*batch, "o")], sums=("i", "j"), kernel=ONCE)


def tensordot(call: OperatorCall) -> Said:
    a, b = call.ins
    left = [d % len(a) for d in call.integers(2, "dims_self")]
    right = [d % len(b) for d in call.integers(3, "dims_other")]
    joined = {d: f"k{i}" for i, d in enumerate(right)}
    la = tuple(f"k{left.index(d)}" if d in left else f"m{d}" for d in range(len(a)))
    lb = tuple(joined.get(d, f"n{d}") for d in range(len(b)))
    if any(a[d] != b[e] for d, e in zip(left, right, strict=True)):
        return None
    out = (*(x for x in la if x[0] == "m"), *(x for x in lb if x[0] == "n"))
    return LetteredCall([la, lb], [out], sums=tuple(joined.values()))


def einsum(call: OperatorCall) -> Said:
    """The letters are those of the equation; an ellipsis stands for letters d0, d1 and so on."""
    equation = call.arg(0, "equation")
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(call.ins):
        return None
    dots = max((len(s) - len(t.replace("...", "")) for s, t in zip(call.ins, terms, strict=True)), default=0)
    if not arrow:
        right = _implied(terms)
    out = _dims(right, dots, dots)
    ins = [
        _dims(term, dots, len(shape) - len(term.replace("...", "")))
        for shape, term in zip(call.ins, terms, strict=True)
    ]
    if any(len(set(letters)) < len(letters) for letters in (*ins, out)):  # a diagonal
        return None
    sums = tuple(dict.fromkeys(x for letters in ins for x in letters if x not in out))
    return LetteredCall(_unbroadcast(call.ins, ins), [out], sums=sums)


def _implied(terms: list[str]) -> str:
    """The output of an equation without an arrow: letters that occur once, in alphabetical order."""
    joined = "".join(terms).replace(".", "")
    once = "".join(sorted(x for x in set(joined) if joined.count(x) == 1))
    return ("..." if any("..." in t for t in terms) else "") + once


def _dims(term: str, dots: int, own: int) -> Letters:
    """The letters of one term: its ellipsis stands for the last ``own`` of ``dots`` dims."""
    before, mark, after = term.partition("...")
    between = lettered(dots)[dots - own :] if mark else ()
    return (*before, *between, *after)


def _unbroadcast(shapes: tuple[Shape, ...], ins: list[Letters]) -> list[Letters]:
    """Returns ``ins`` without the letters of dims of one element that are broadcast."""
    size: dict[str, int] = {}
    for shape, letters in zip(shapes, ins, strict=True):
        for n, letter in zip(shape, letters, strict=True):
            size[letter] = max(n, size.get(letter, 1))
    return [
        tuple(x if n == size[x] else "" for n, x in zip(shape, letters, strict=True))
        for shape, letters in zip(shapes, ins, strict=True)
    ]
