"""The content of a MindSpore parameter strategy file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

StrategyForm = Literal["protobuf", "json"]
SAVED, MERGED = 2, 1  # ``counter`` of a first save, and of a merge
_PREFIXED = re.compile(r"(0|[1-9]\d{0,8})-(.+)", re.DOTALL)


@dataclass(frozen=True)
class OperatorParts:
    """How many parts each dim of each input is cut into; empty for an operator with layouts."""

    name: str
    stage: int
    inputs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Slicing:
    """The layout of one parameter over the ranks of a stage.

    ``devices`` arranges these ranks, row-major. ``dims`` has, for each dim, the axes of ``devices`` that cut
    it, outermost first, numbered from the last axis; ranks along any other axis repeat the slice.
    ``shard_size`` consecutive ranks among the repeats cut dim 0 of the slice further: -1 means all repeats, 0
    none. ``shard_step`` is the distance between repeats. ``nested``: the file lists the axes of each dim
    separately. ``shape`` is that of the full tensor; only the JSON format has it.
    """

    devices: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    nested: bool = False
    shard_size: int = 0
    shard_step: int = 0
    field: int = 0
    split_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        axes = [axis for dim in self.dims for axis in dim]
        if not self.devices or min(self.devices) < 1:
            raise ValueError(
                f"device matrix {list(self.devices)}: it needs at least one axis, each of size 1 or more"
            )
        if any(not 0 <= axis < len(self.devices) for axis in axes):
            raise ValueError(f"tensor map {shown(self.dims)}: the device matrix has {len(self.devices)} axes")
        if len({*axes}) < len(axes):
            raise ValueError(f"tensor map {shown(self.dims)}: one axis cuts two dims")

        # optimizer sharding, over the repeats
        if self.shard_size < -1:
            raise ValueError(f"opt_weight_shard_size {self.shard_size} is neither a size nor -1")
        if self.shard_size > 0 and self.shard_step and self.repeats % self.shard_size:
            raise ValueError(
                f"opt_weight_shard_size {self.shard_size} does not divide the {self.repeats} repeats"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks of a stage."""
        return prod(self.devices)

    def count(self, dim: int) -> int:
        """Returns the number of parts that the device axes cut ``dim`` into, without optimizer sharding."""
        return prod(self.devices[-1 - axis] for axis in self.dims[dim])

    @property
    def repeats(self) -> int:
        """The number of ranks with the same slice, before optimizer sharding."""
        return self.ranks // prod(self.count(dim) for dim in range(len(self.dims)))

    @property
    def shards(self) -> int:
        """The number of parts that optimizer sharding cuts dim 0 of a slice into."""
        if not self.dims or not self.shard_size or not self.shard_step:
            return 1
        return self.repeats if self.shard_size < 0 else self.shard_size


@dataclass(frozen=True)
class StrategyFile:
    """A strategy file. ``layouts`` are keyed by the file's names, in a merged file as ``1-net.weight``."""

    counter: int
    operators: tuple[OperatorParts, ...]
    layouts: Mapping[str, Slicing]

    @property
    def merged(self) -> bool:
        """True if names are prefixed with their stage. A name with a dash is not enough to tell."""
        marked = bool(self.layouts) and all(map(_PREFIXED.fullmatch, self.layouts))
        return marked and (self.counter == MERGED or len({op.stage for op in self.operators}) > 1)

    def stages(self) -> dict[int, dict[str, Slicing]]:
        """Returns the layouts of each stage, by their names without the stage.

        There is one stage unless the file is merged. Raises ``ValueError`` if a stage is missing.
        """
        if not self.merged:
            return {self.stage: dict(self.layouts)}
        out: dict[int, dict[str, Slicing]] = {op.stage: {} for op in self.operators}
        for name, slicing in self.layouts.items():
            stage, own = _PREFIXED.fullmatch(name).groups()  # type: ignore[union-attr]
            out.setdefault(int(stage), {})[own] = slicing
        missing = missing_stages(out)
        if missing:
            raise ValueError(f"stage {missing} of {max(out) + 1} is missing")
        return dict(sorted(out.items()))

    @property
    def stage(self) -> int:
        """The stage of a file that is not merged.

        It is 0 if the file lists no operator, because MindSpore writes the stage in operators only. Raises
        ``ValueError`` if operators are of several stages.
        """
        stages = {op.stage for op in self.operators} or {0}
        if len(stages) > 1:
            raise ValueError(
                f"operators of stages {sorted(stages)}, but names of parameters without a stage in front"
            )
        return stages.pop()


def shown(dims: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns ``dims`` as a tensor map of lists, for messages."""
    return [list(dim) or [-1] for dim in dims]


def missing_stages(stages: Collection[int]) -> str:
    """Returns the missing stages as text, shortened because a file may contain a huge stage number."""
    last = max(stages)
    if last > 2 * len(stages) + 16:
        return f"{next(n for n in range(last) if n not in stages)} and more"
    return ", ".join(str(n) for n in range(last) if n not in stages)
