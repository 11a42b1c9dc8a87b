"""Strategies over device matrices as a request or a file has them: axes by name, a list for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from launcher.plan.sharding.op_rule import Letters, OpRule, OpStrategy
from launcher.plan.sharding.tensor_layout import TensorLayout

FORM = "{matrix: [2, 4], axes: [x, y], in: [[x, y], [y, null]], out: [[x, null]]}"
NAMES = "xyzuvw"
Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WrittenStrategy:
    """``outs``: the layout in which each output leaves, where that is said; else as it comes out, summed."""

    strategy: OpStrategy
    outs: tuple[TensorLayout | None, ...]


def as_written(strategy: OpStrategy, rule: OpRule) -> dict[str, Any]:
    """With axes called x, y, z and so on, and every tensor.

    >>> matmul = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 8), ("k", 8), ("n", 8)), sums=("k",))
    >>> as_written(OpStrategy((2, 4), (("m", (0,)), ("k", (1,)))), matmul)
    {'matrix': [2, 4], 'axes': ['x', 'y'], 'in': [['x', 'y'], ['y', None]], 'out': [['x', None]]}
    """
    names = [NAMES[a] if a < len(NAMES) else f"a{a}" for a in range(len(strategy.matrix))]

    def tensor(letters: Letters) -> list[Any]:
        cut = [[names[a] for a in strategy.of.get(letter, ())] for letter in letters]
        return [dim if len(dim) > 1 else (dim[0] if dim else None) for dim in cut]

    return {
        "matrix": list(strategy.matrix),
        "axes": names,
        "in": [tensor(letters) for letters in rule.ins],
        "out": [tensor(letters) for letters in rule.outs],
    }


def read(value: Mapping[str, Any], rule: OpRule, ranks: int) -> WrittenStrategy:
    """Of an operator with this rule, on the ``ranks`` of a stage; what a matrix leaves repeats the work.

    Letters of the inputs that are listed are cut as these say, others as the outputs. Raises ``ValueError``.
    """
    axes = _axes(value, ranks)
    matrix = tuple(n for n, _ in axes.values())
    number = {name: at for name, (_, at) in axes.items()}
    over = matrix if prod(matrix) == ranks else (*matrix, ranks // prod(matrix))

    # each tensor by itself, then each letter
    ins = [*_tensors("in", value, rule.ins, number)]
    outs = [*_tensors("out", value, rule.outs, number)]
    said: dict[str, tuple[tuple[int, ...], str]] = {}
    for where, letters, dims in ins:
        _say(said, where, letters, dims, agree=True)
    for where, letters, dims in outs:
        _say(said, where, letters, dims, agree=False)
    _check_once(said, [*number])
    strategy = OpStrategy(over, tuple((letter, cut) for letter, (cut, _) in said.items() if cut))
    for where, letters, dims in (*ins, *outs):
        for d, (letter, cut) in enumerate(zip(letters, dims, strict=True)):
            n, parts = rule.size.get(letter, 0), prod(over[a] for a in cut)
            if n % parts:
                raise ValueError(f"{where}[{d}]: {n} elements do not divide into {parts} parts")

    wanted = [TensorLayout(over, dims) for _, _, dims in outs]
    return WrittenStrategy(strategy, (*wanted, *[None] * (len(rule.outs) - len(wanted))))


def _axes(value: Mapping[str, Any], ranks: int) -> dict[str, tuple[int, int]]:
    """The size and place of each axis by its name."""
    matrix, names = value.get("matrix"), value.get("axes")
    if {*value} - {"matrix", "axes", "in", "out"} or not _listed(matrix) or not _listed(names):
        raise ValueError(f"{dict(value)}: not of the form {FORM}")
    if not matrix or not all(type(n) is int and n > 0 for n in matrix) or not all(map(_name, names)):
        raise ValueError(f"matrix {list(matrix)}, axes {list(names)}: not of the form {FORM}")
    if len(names) != len(matrix) or len({*names}) < len(names):
        raise ValueError(f"axes {list(names)}: not a name of its own for each of {list(matrix)}")
    if ranks % prod(matrix):
        raise ValueError(f"matrix {list(matrix)}: {prod(matrix)} do not divide the {ranks} ranks of a stage")
    return {name: (n, at) for at, (n, name) in enumerate(zip(matrix, names, strict=True))}


def _listed(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _name(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", "None")


def _tensors(
    side: str, value: Mapping[str, Any], every: Sequence[Letters], number: Mapping[str, int]
) -> Iterator[tuple[str, Letters, Dims]]:
    """Where it is written, its letters and the axes that cut its dims, of each tensor that is listed."""
    given = value.get(side, ())
    if not _listed(given) or not all(map(_listed, given)):
        raise ValueError(f"{side}: {given}: not a list with a list a tensor")
    if len(given) > len(every):
        raise ValueError(f"{side}: {len(given)} tensors; there are {len(every)}")
    for at, (tensor, letters) in enumerate(zip(given, every, strict=False)):
        where = f"{side}[{at}]"
        if len(tensor) != len(letters):
            raise ValueError(f"{where}: {len(tensor)} entries for {len(letters)} dims")
        dims = tuple(_dim(f"{where}[{d}]", entry, number) for d, entry in enumerate(tensor))
        flat = [a for dim in dims for a in dim]
        twice = next((name for name, a in number.items() if flat.count(a) > 1), None)
        if twice is not None:
            raise ValueError(f"{where}: axis {twice} cuts it twice")
        yield where, letters, dims


def _dim(where: str, entry: Any, number: Mapping[str, int]) -> tuple[int, ...]:
    alone = [] if entry in (None, "None") else [entry]
    names = entry if _listed(entry) else alone
    unknown = next((n for n in names if not isinstance(n, str) or n not in number), None)
    if unknown is not None:
        raise ValueError(f"{where}: {unknown!r} is no axis; there are {', '.join(number)} and null")
    return tuple(number[n] for n in names)


def _say(
    said: dict[str, tuple[tuple[int, ...], str]], where: str, letters: Letters, dims: Dims, *, agree: bool
) -> None:
    """Keep what cuts each letter; ``agree``: another tensor has to say the same."""
    for d, (letter, cut) in enumerate(zip(letters, dims, strict=True)):
        if not letter and cut:
            raise ValueError(f"{where}[{d}]: each rank needs all of this dim")
        if not letter:
            continue
        before, first = said.setdefault(letter, (cut, f"{where}[{d}]"))
        if agree and before != cut:
            raise ValueError(f"{where}[{d}]: the same dim as {first}, and not cut like it")


def _check_once(said: Mapping[str, tuple[tuple[int, ...], str]], names: Sequence[str]) -> None:
    """An axis gives each rank one part of one dim."""
    first: dict[int, str] = {}
    for cut, where in said.values():
        for a in cut:
            if first.setdefault(a, where) != where:
                raise ValueError(f"{where}: axis {names[a]} cuts {first[a]} already")
