"""One operation as one rank runs it: how it is split, and which parts this rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from launcher.plan.sharding.op_graph import OpGraph, OpNode
from launcher.plan.sharding.op_rule import OpRule, OpStrategy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LocalCall:
    """An operation on one rank.

    ``ins`` and ``outs`` have shapes of full tensors, ``rank`` is within the stage.

    ``dtype`` and ``strides`` are those of the first full tensor; ``strides`` is empty if it is row-major.
    """

    node: OpNode
    rule: OpRule
    strategy: OpStrategy
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]
    rank: int
    dtype: str
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, node: OpNode, graph: OpGraph, rule: OpRule, strategy: OpStrategy, rank: int) -> LocalCall:
        first = graph.values[node.ins[0]] if node.ins else None
        made = graph.values[node.outs[0]].spec.dtype if node.outs else ""
        return cls(
            node=node,
            rule=rule,
            strategy=strategy,
            ins=graph.shapes(node),
            outs=graph.makes(node),
            rank=rank,
            dtype=first.spec.dtype if first is not None else made,
            strides=first.strides if first is not None else (),
        )

    @cached_property
    def local_outs(self) -> tuple[Shape, ...]:
        """The shapes of this rank's parts of the outputs."""
        layouts = [self.strategy.cut(letters) for letters in self.rule.outs]
        return tuple(x.local_shape(shape) for x, shape in zip(layouts, self.outs, strict=True))

    def axes(self, letters: tuple[str, ...]) -> tuple[int, ...]:
        """Return the axes that split any of ``letters``."""
        return tuple(sorted({a for letter in letters if letter for a in self.strategy.of.get(letter, ())}))

    def ways(self, *letters: str) -> int:
        """Return the number of parts into which ``letters`` are split together."""
        return prod(self.strategy.matrix[a] for a in self.axes(letters))

    def part(self, letter: str) -> int:
        """Return which part of the dims with ``letter`` this rank has."""
        layout = self.strategy.cut((letter,) if letter else ())
        return layout.part(layout.dims[0], self.rank) if letter else 0

    def first(self, letters: tuple[str, ...]) -> bool:
        """Whether this rank has the first parts of all ``letters``."""
        return all(self.part(letter) == 0 for letter in letters)
