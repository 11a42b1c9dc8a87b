"""Rules of products: matrices, convolutions, attention.

Spatial dims are not cut.
"""

from __future__ import annotations

from launcher.extras.device_matrix.op_rule import Letters
from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    Shape,
    broadcast,
    lettered,
)

ONCE = "bias_once"


def linear(call: OperatorCall) -> Lettering:
    batch = lettered(len(call.ins[0]) - 1)
    n = () if len(call.ins[1]) == 1 else ("n",)
    bias = [("n",)] if len(call.ins) == 3 else []
    return LetteredCall([(*batch, "k"), (*n, "k"), *bias], [(*batch, *n)], sums=("k",), kernel=ONCE)


def matmul(call: OperatorCall) -> Lettering:
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


def addmm(call: OperatorCall) -> Lettering:
    """addmm, baddbmm and addmv: ``bias + a @ b``."""
    batch = lettered(len(call.ins[1]) - 2)
    n: Letters = ("n",) if len(call.ins[2]) > len(batch) + 1 else ()
    out = (*batch, "m", *n)
    bias = broadcast(call.ins[0], call.outs[0], out)
    return LetteredCall([bias, (*batch, "m", "k"), (*batch, "k", *n)], [out], sums=("k",), kernel=ONCE)


def outer(call: OperatorCall) -> Lettering:
    return LetteredCall([("m",), ("n",)], [("m", "n")])


def bilinear(call: OperatorCall) -> Lettering:
    """``[.., i], [.., j], [o, i, j] -> [.., o]``."""
    batch = lettered(len(call.ins[0]) - 1)
    ins: list[Letters] = [(*batch, "i"), (*batch, "j"), ("o", "i", "j")]
    if len(call.ins) == 4:
        ins.append(("o",))
    return LetteredCall(ins, [(*batch, "o")], sums=("i", "j"), kernel=ONCE)


def tensordot(call: OperatorCall) -> Lettering:
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


def einsum(call: OperatorCall) -> Lettering:
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


def convolution(call: OperatorCall) -> Lettering:
    transposed = call.node.kind.startswith("conv_transpose")
    groups = call.integer(6, "groups", 1)
    weight = call.ins[1]
    places = ("",) * (len(weight) - 2)
    batch: Letters = ("n",) if len(call.ins[0]) == len(weight) else ()

    # each group is a separate convolution; groups are consecutive in both channel dims
    if groups > 1:
        into = out = "g"
        kernel = ("g", "")
    else:
        into, out = "i", "o"
        kernel = ("i", "o") if transposed else ("o", "i")
    ins: list[Letters] = [(*batch, into, *places), (*kernel, *places)]
    if len(call.ins) == 3:
        ins.append((out,))
    return LetteredCall(
        ins,
        [(*batch, out, *places)],
        sizes={"g": groups},
        sums=("i",) if groups == 1 else (),
        kernel=ONCE,
    )


def by_place(call: OperatorCall) -> Lettering:
    """Pooling and interpolation: all dims before the spatial ones may be cut."""
    kind = call.node.kind
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in kind)
    lead = len(call.ins[0]) - spatial
    letters = (*lettered(lead), *[""] * spatial)
    return LetteredCall([letters], [letters] * len(call.outs))


def attention(call: OperatorCall) -> Lettering:
    """With grouped queries, the heads of keys and values are the outermost part of those of queries.

    The kernel has to know which query positions a rank has, for a causal mask.
    """
    q, k, v = call.ins[:3]
    if call.arg(4, "dropout_p", 0.0) != 0.0:
        return None
    grouped = call.node.kwarg("enable_gqa", False) is True and len(q) > 2 and q[-3] != k[-3]
    if not grouped and not q[:-2] == k[:-2] == v[:-2]:
        return None

    # Dims before the last two have the same cut in all tensors; a single head of keys and values has none.
    batch = lettered(len(q) - 2)
    queries = (*batch, "l", "")
    single = grouped and k[-3] == 1
    keys = (*((*batch[:-1], "") if single else batch), "", "")
    ins: list[Letters] = [queries, keys, keys]
    if len(call.ins) == 4:
        scores = (*q[:-1], k[-2])
        ins.append(broadcast(call.ins[3], scores, (*batch, "l", "")))
    return LetteredCall(ins, [queries], kernel="attention")
