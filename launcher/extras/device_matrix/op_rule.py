"""The rule for how an operator may be cut, with a letter for each dim, and the strategy that cuts it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from launcher.extras.device_matrix.layout import TensorLayout

Letters = tuple[str, ...]
"""An index letter for each dim of one tensor; "" for a dim that every rank needs in full."""


@dataclass(frozen=True)
class OpRule:
    """The ways in which one operator may be cut.

    ``ins`` and ``outs``: letters of the tensors it takes and makes. ``sizes``: the size of each letter, which
    its number of slices must divide. A letter of a dim that a view merges or splits stands for the outermost
    part: in ``[8, 3 * 4] -> [8, 3, 4]``, dim 1 of both tensors has the same letter, of size 3. ``sums``:
    letters that are summed over: if one is cut, each rank has a term of the output. ``inside``: letters whose
    cut needs collectives inside of the operator (softmax over its classes). ``kernel``: what a rank runs on
    its parts; "" stands for the operator itself, called with the sizes of the parts.

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
    """How one operator is cut over the ranks of a stage: for each letter, ``axes`` of the device ``matrix``.

    Axes are in order, outermost first. A letter without axes is not cut. Ranks along an axis that no letter
    uses repeat the computation.
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
        """The axes that cut a letter, in ascending order."""
        return tuple(sorted(a for _, axes in self.axes for a in axes))

    def cut(self, letters: Letters) -> TensorLayout:
        """Returns the layout of a tensor with these letters."""
        return TensorLayout(self.matrix, tuple(self.of.get(letter, ()) for letter in letters))

    def takes(self, rule: OpRule, place: int) -> TensorLayout:
        """Returns the layout in which the operator takes input ``place``."""
        return self.cut(rule.ins[place])

    def makes(self, rule: OpRule, place: int) -> TensorLayout:
        """Returns the layout of output ``place``, partial over the axes of letters that are summed over."""
        out = self.cut(rule.outs[place])
        terms = tuple(sorted(a for letter in rule.sums for a in self.of.get(letter, ())))
        return TensorLayout(out.matrix, out.dims, terms)

    def gradient_terms(self, rule: OpRule, place: int) -> tuple[int, ...]:
        """Returns the axes over which the gradient of input ``place`` consists of terms of a sum.

        These are the axes that cut the operator but not this input.
        """
        own = {a for axes in self.takes(rule, place).dims for a in axes}
        return tuple(a for a in self.used if a not in own)

    def fits(self, rule: OpRule) -> bool:
        """Returns true if the number of slices of each letter divides its size."""
        return all(n % self.slices(letter) == 0 for letter, n in rule.sizes)

    def slices(self, letter: str) -> int:
        """Returns the number of slices that ``letter`` is cut into."""
        return prod(self.matrix[a] for a in self.of.get(letter, ()))
