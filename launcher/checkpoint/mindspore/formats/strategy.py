"""What a MindSpore parameter strategy file says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

StrategyForm = Literal["protobuf", "json"]
SAVED, MERGED = 2, 1  # ``counter`` of a first save, of a merge
_PREFIXED = re.compile(r"(0|[1-9]\d{0,8})-(.+)", re.DOTALL)


@dataclass(frozen=True)
class Operator:
    """How often each dim of each input is cut; nothing for an operator that was given layouts."""

    name: str
    stage: int
    inputs: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Slicing:
    """How one parameter lies on the ranks of a stage.

    ``devices`` arranges these ranks, row-major. ``dims`` has, for each dim, the axes of ``devices`` that cut
    it, outermost first, counted from the last axis; an axis in none of them repeats the slice. Then
    ``shard_size`` ranks that follow each other among the repeats cut dim 0 of the slice further: -1 means all
    repeats, 0 none. ``shard_step`` is the distance of the repeats. ``nested`` says in which of its two ways
    the file has ``dims``. ``shape`` is that of the whole tensor, which only the JSON form has.
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
                f"device matrix {list(self.devices)}: sizes are at least 1, and there is at least one"
            )
        if any(not 0 <= axis < len(self.devices) for axis in axes):
            raise ValueError(f"tensor map {shown(self.dims)}: the device matrix has {len(self.devices)} axes")
        if len({*axes}) < len(axes):
            raise ValueError(f"tensor map {shown(self.dims)}: an axis cuts twice")

        # optimizer sharding, over the repeats
        if self.shard_size < -1:
            raise ValueError(f"opt_weight_shard_size {self.shard_size} is neither a size nor -1")
        if self.shard_size > 0 and self.shard_step and self.repeats % self.shard_size:
            raise ValueError(
                f"opt_weight_shard_size {self.shard_size} does not divide the {self.repeats} repeats"
            )

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return prod(self.devices)

    def count(self, dim: int) -> int:
        """Into how many parts the device axes cut ``dim``, optimizer sharding aside."""
        return prod(self.devices[-1 - axis] for axis in self.dims[dim])

    @property
    def repeats(self) -> int:
        """Ranks with the same slice, before optimizer sharding."""
        return self.ranks // prod(self.count(dim) for dim in range(len(self.dims)))

    @property
    def shards(self) -> int:
        """Into how many parts optimizer sharding cuts dim 0 of a slice."""
        if not self.dims or not self.shard_size or not self.shard_step:
            return 1
        return self.repeats if self.shard_size < 0 else self.shard_size


@dataclass(frozen=True)
class StrategyFile:
    """``layouts`` are by name as the file has it, in a merged one after the stage: ``1-net.weight``."""

    counter: int
    operators: tuple[Operator, ...]
    layouts: Mapping[str, Slicing]

    @property
    def merged(self) -> bool:
        """Whether names carry their stage. A dash in a name does not make it so."""
        marked = bool(self.layouts) and all(map(_PREFIXED.fullmatch, self.layouts))
        return marked and (self.counter == MERGED or len({op.stage for op in self.operators}) > 1)

    def stages(self) -> dict[int, dict[str, Slicing]]:
        """The layouts of each stage, by their own names; one stage alone unless the file is merged."""
        if not self.merged:
            return {self.stage: dict(self.layouts)}
        out: dict[int, dict[str, Slicing]] = {op.stage: {} for op in self.operators}
        for name, slicing in self.layouts.items():
            stage, own = _PREFIXED.fullmatch(name).groups()  # type: ignore[union-attr]
            out.setdefault(int(stage), {})[own] = slicing
        missing = _holes(out)
        if missing:
            raise ValueError(f"stage {missing} of {max(out) + 1} is missing")
        return dict(sorted(out.items()))

    @property
    def stage(self) -> int:
        """Of a file of one stage; 0 when it lists no operator, which is where MindSpore writes it."""
        stages = {op.stage for op in self.operators} or {0}
        if len(stages) > 1:
            raise ValueError(
                f"operators of stages {sorted(stages)}, but parameters without a stage before their names"
            )
        return stages.pop()


def merge(parts: Sequence[tuple[str, StrategyFile]]) -> StrategyFile:
    """One file out of those of all stages, in the order given; each comes with what messages call it.

    Raises ``ValueError`` when two files of one stage disagree or a stage is missing. A stage without
    parameters of its own is fine as long as it lists an operator.
    """
    seen: dict[int, tuple[str, StrategyFile]] = {}
    for origin, file in parts:
        if file.merged:
            raise ValueError(f"{origin}: already merged; give the files of single stages")
        if not file.operators:
            raise ValueError(f"{origin}: lists no operator, and only operators say which stage a file is of")
        first, other = seen.setdefault(file.stage, (origin, file))
        _agree(first, other, origin, file)

    assert seen, parts
    missing = _holes(seen)
    if missing:
        where = ", ".join(origin for origin, _ in parts)
        raise ValueError(
            f"{where}: stage {missing} of {max(seen) + 1} is missing; give the files of every stage"
        )
    operators = tuple(op for _, file in seen.values() for op in file.operators)
    layouts = {f"{stage}-{name}": s for stage, (_, file) in seen.items() for name, s in file.layouts.items()}
    return StrategyFile(MERGED, operators, layouts)


def shown(dims: Iterable[Sequence[int]]) -> list[list[int]]:
    """As a tensor map of lists."""
    return [list(dim) or [-1] for dim in dims]


def _agree(first: str, a: StrategyFile, second: str, b: StrategyFile) -> None:
    odd = [n for n in {**a.layouts, **b.layouts} if a.layouts.get(n) != b.layouts.get(n)]
    if odd:
        raise ValueError(
            f"{first} and {second} are both of stage {a.stage} and disagree on {', '.join(sorted(odd))}"
        )


def _holes(stages: Collection[int]) -> str:
    """Missing ones, as text; stage numbers come from files and may be huge."""
    last = max(stages)
    if last > 2 * len(stages) + 16:
        return f"{next(n for n in range(last) if n not in stages)} and more"
    return ", ".join(str(n) for n in range(last) if n not in stages)
