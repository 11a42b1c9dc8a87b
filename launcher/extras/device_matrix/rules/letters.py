"""Makes the rule of one call of an operator from letters for the dims of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import TypeAlias

from launcher.extras.device_matrix.op_graph import Arg, OpGraph, OpNode, Ref
from launcher.extras.device_matrix.op_rule import Letters, OpRule

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
        """The argument at ``place``, or with the keyword ``name``; ``otherwise`` if there is none."""
        args = self.node.args
        return args[place] if place < len(args) else self.node.kwarg(name, otherwise)

    def integer(self, place: int, name: str, otherwise: int = 0) -> int:
        value = self.arg(place, name, otherwise)
        return value if isinstance(value, int) else otherwise

    def integers(self, place: int, name: str) -> tuple[int, ...]:
        """An argument that is a list of integers, or a single one."""
        value = self.arg(place, name)
        if isinstance(value, int):
            return (value,)
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()

    def dim(self, place: int, name: str, otherwise: int = 0, dims: int | None = None) -> int:
        """An argument that is a dim, counted from the front of a tensor with ``dims`` dims.

        By default that is the first tensor.
        """
        return self.integer(place, name, otherwise) % max(1, len(self.ins[0]) if dims is None else dims)

    def dims(self, place: int, name: str) -> tuple[int, ...]:
        """An argument that lists dims of the first tensor, counted from the front; by default all dims."""
        count = len(self.ins[0])
        return tuple(d % max(1, count) for d in self.integers(place, name)) or tuple(range(count))

    def has(self, place: int, name: str) -> bool:
        """Returns true if the argument is a tensor."""
        return isinstance(self.arg(place, name), Ref)


@dataclass(frozen=True)
class LetteredCall:
    """The result of a rule function. ``sizes``: sizes of letters that are smaller than their dims."""

    ins: Sequence[Letters]
    outs: Sequence[Letters]
    sizes: Mapping[str, int] = field(default_factory=dict)
    sums: Letters = ()
    inside: Letters = ()
    kernel: str = ""


Lettering: TypeAlias = LetteredCall | None


def rule_from(call: OperatorCall, lettered_call: LetteredCall) -> OpRule:
    """Returns the rule with the sizes of letters: the gcd of all dims that have the letter.

    A letter that cannot be cut, because its size is 1, is dropped.
    """
    sizes: dict[str, int] = {}
    for shape, letters in zip(
        (*call.ins, *call.outs), (*lettered_call.ins, *lettered_call.outs), strict=True
    ):
        for n, letter in zip(shape, letters, strict=True):
            sizes[letter] = gcd(sizes.get(letter, 0), n)
    sizes |= {letter: gcd(n, sizes[letter]) for letter, n in lettered_call.sizes.items() if letter in sizes}
    kept = {letter: n for letter, n in sizes.items() if letter and n > 1}
    return OpRule(
        ins=tuple(tuple(x if x in kept else "" for x in letters) for letters in lettered_call.ins),
        outs=tuple(tuple(x if x in kept else "" for x in letters) for letters in lettered_call.outs),
        sizes=tuple(kept.items()),
        sums=tuple(x for x in lettered_call.sums if x in kept),
        inside=tuple(x for x in lettered_call.inside if x in kept),
        kernel=lettered_call.kernel,
    )


def lettered(dims: int, prefix: str = "d") -> Letters:
    """Returns a letter for each dim: d0, d1 and so on."""
    return tuple(f"{prefix}{d}" for d in range(dims))


def without(letters: Letters, *dims: int) -> Letters:
    """Returns ``letters`` without those of ``dims``, which are then not cut."""
    return tuple("" if d in dims else letter for d, letter in enumerate(letters))


def uncut_letters(shapes: Sequence[Shape]) -> tuple[Letters, ...]:
    """Returns letters for tensors that are not cut."""
    return tuple(("",) * len(shape) for shape in shapes)


def broadcast(shape: Shape, out: Shape, letters: Letters) -> Letters:
    """The letters of a tensor of ``shape`` that is broadcast to ``out``, whose dims have ``letters``."""
    lead = len(out) - len(shape)
    return tuple(letters[lead + d] if n == out[lead + d] else "" for d, n in enumerate(shape))
