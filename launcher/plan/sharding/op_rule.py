"""How an operator may be cut (a letter for each dim of its tensors), and how it is (axes for letters)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from launcher.plan.sharding.tensor_layout import TensorLayout

Letters = tuple[str, ...]
"""Of one tensor: an index letter a dim, "" for a dim that every rank needs whole."""


@dataclass(frozen=True)
class OpRule:
    """``ins`` and ``outs``: letters of the tensors it takes and makes; ``sizes``: what slices of each divide.

    A letter of a dim that views merge or split stands for its outermost part: of ``[8, 3 * 4] -> [8, 3, 4]``
    dim 1 and dim 1 share a letter of size 3. ``sums``: letters that are added up: where one is cut, each rank
    has a term of the output. ``inside``: letters that may be cut, and take collectives inside of the operator
    (softmax over its classes). ``kernel``: what a rank runs on its parts; "" is the operator itself, with the
    sizes among its arguments those of the parts.

    >>> OpRule((("m", "k"), ("n", "k")), (("m", "n"),), (("k", 4), ("m", 8), ("n", 2)), sums=("k",)).letters
    ('k', 'm', 'n')
    """

    ins: tuple[Letters, ...]
    outs: tuple[Letters, ...]
    sizes: tuple[tuple[str, int], ...]
    sums: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    kernel: str = ""

    @property
    def letters(self) -> Letters:
        return tuple(letter for letter, _ in self.sizes)

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)


@dataclass(frozen=True)
class OpStrategy:
    """One operator over the ranks of a stage: ``axes`` of the device ``matrix`` that cut each letter.

    Outermost first; a letter that is not named is whole. What no letter uses is repeated computation.
    """

    matrix: tuple[int, ...]
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @cached_property
    def of(self) -> dict[str, tuple[int, ...]]:
        return dict(self.axes)

    @property
    def ranks(self) -> int:
        return prod(self.matrix)

    @property
    def used(self) -> tuple[int, ...]:
        """The axes that cut anything."""
        return tuple(sorted(a for _, axes in self.axes for a in axes))

    def cut(self, letters: Letters) -> TensorLayout:
        """The layout of a tensor with these letters."""
        return TensorLayout(self.matrix, tuple(self.of.get(letter, ()) for letter in letters))

    def takes(self, rule: OpRule, place: int) -> TensorLayout:
        """The layout in which it takes tensor ``place``."""
        return self.cut(rule.ins[place])

    def makes(self, rule: OpRule, place: int) -> TensorLayout:
        """The layout of what it makes: terms of a sum over the axes of letters that are added up."""
        out = self.cut(rule.outs[place])
        terms = tuple(sorted(a for letter in rule.sums for a in self.of.get(letter, ())))
        return TensorLayout(out.matrix, out.dims, terms)

    def gradient_terms(self, rule: OpRule, place: int) -> tuple[int, ...]:
        """The axes over which the gradient of tensor ``place`` comes back as terms of a sum.

        Those that cut the operator, but not this tensor.
        """
        own = {a for axes in self.takes(rule, place).dims for a in axes}
        return tuple(a for a in self.used if a not in own)

    def fits(self, rule: OpRule) -> bool:
        """Whether the slices of each letter divide it."""
        return all(n % self.slices(letter) == 0 for letter, n in rule.sizes)

    def slices(self, letter: str) -> int:
        """Into how many a letter is cut."""
        return prod(self.matrix[a] for a in self.of.get(letter, ()))
