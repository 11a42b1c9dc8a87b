"""One call of an operator as rules read it, and how a rule is made from letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import TypeAlias

from launcher.plan.sharding.op_graph import Arg, OpGraph, OpNode, Ref
from launcher.plan.sharding.op_rule import Letters, OpRule

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperatorCall:
    """A node, and the shapes of its tensors."""

    node: OpNode
    graph: OpGraph

    @cached_property
    def ins(self) -> tuple[Shape, ...]:
        return self.graph.shapes(self.node)

    @cached_property
    def outs(self) -> tuple[Shape, ...]:
        return self.graph.makes(self.node)

    def arg(self, place: int, name: str, otherwise: Arg = None) -> Arg:
        """The argument that stands at ``place`` or under its name."""
        args = self.node.args
        return args[place] if place < len(args) else self.node.kwarg(name, otherwise)

    def integer(self, place: int, name: str, otherwise: int = 0) -> int:
        value = self.arg(place, name, otherwise)
        return value if isinstance(value, int) else otherwise

    def integers(self, place: int, name: str) -> tuple[int, ...]:
        """A list of them, or one alone."""
        value = self.arg(place, name)
        if isinstance(value, int):
            return (value,)
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()

    def dim(self, place: int, name: str, otherwise: int = 0, dims: int | None = None) -> int:
        """A dim counted from the front, of a tensor of ``dims`` (the first that it takes)."""
        return self.integer(place, name, otherwise) % max(1, len(self.ins[0]) if dims is None else dims)

    def dims(self, place: int, name: str) -> tuple[int, ...]:
        """Dims of its first tensor, counted from the front; all of them where none is named."""
        count = len(self.ins[0])
        return tuple(d % max(1, count) for d in self.integers(place, name)) or tuple(range(count))

    def has(self, place: int, name: str) -> bool:
        """Whether a tensor is there."""
        return isinstance(self.arg(place, name), Ref)


@dataclass(frozen=True)
class LetteredCall:
    """What a rule function says of a call. ``sizes``: of letters that are smaller than their dims."""

    ins: Sequence[Letters]
    outs: Sequence[Letters]
    sizes: Mapping[str, int] = field(default_factory=dict)
    sums: Letters = ()
    inside: Letters = ()
    kernel: str = ""


Said: TypeAlias = LetteredCall | None


def rule_from(call: OperatorCall, said: LetteredCall) -> OpRule:
    """Sizes are filled in: what slices of a letter must divide is the gcd of the dims that have it.

    A letter that cannot be cut (one of its dims has a single element) is dropped.
    """
    sizes: dict[str, int] = {}
    for shape, letters in zip((*call.ins, *call.outs), (*said.ins, *said.outs), strict=True):
        for n, letter in zip(shape, letters, strict=True):
            sizes[letter] = gcd(sizes.get(letter, 0), n)
    sizes |= {letter: gcd(n, sizes[letter]) for letter, n in said.sizes.items() if letter in sizes}
    kept = {letter: n for letter, n in sizes.items() if letter and n > 1}
    return OpRule(
        ins=tuple(tuple(x if x in kept else "" for x in letters) for letters in said.ins),
        outs=tuple(tuple(x if x in kept else "" for x in letters) for letters in said.outs),
        sizes=tuple(kept.items()),
        sums=tuple(x for x in said.sums if x in kept),
        inside=tuple(x for x in said.inside if x in kept),
        kernel=said.kernel,
    )


def lettered(dims: int, prefix: str = "d") -> Letters:
    """A letter for each dim: d0, d1 and so on."""
    return tuple(f"{prefix}{d}" for d in range(dims))


def without(letters: Letters, *dims: int) -> Letters:
    """The same, with ``dims`` whole."""
    return tuple("" if d in dims else letter for d, letter in enumerate(letters))


def whole(shapes: Sequence[Shape]) -> tuple[Letters, ...]:
    """No letters."""
    return tuple(("",) * len(shape) for shape in shapes)


def broadcast(shape: Shape, out: Shape, letters: Letters) -> Letters:
    """Of a tensor of ``shape`` that is broadcast to ``out``, whose dims have ``letters``."""
    lead = len(out) - len(shape)
    return tuple(letters[lead + d] if n == out[lead + d] else "" for d, n in enumerate(shape))
