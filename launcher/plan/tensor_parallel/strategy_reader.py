"""Reads a strategy of ``parallel.operators``: its fields, and the axes ``dp`` and ``tp`` that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from launcher.plan.values.grid import Grid

Axes = tuple[tuple[str, ...], ...]
"""The axes that cut each dim, outermost first; ``dp`` means all data-parallel ranks."""

DP, TP = "dp", "tp"
TENSORS = ("in", "out", "input", "output", "layout")
"""Keys of a strategy that are not names of parameters."""


@dataclass(frozen=True)
class WrittenStrategy:
    """A strategy as written, read without its module. A field of a wrong form is empty; it is refused later.

    ``inputs``: the entries of each tensor of ``in``. ``layout``: the matrix of MindSpore's ``layout``.
    ``over_matrix``: it has its own device matrix. ``sliced``: all of its entries are numbers of slices.
    """

    inputs: tuple[tuple[Any, ...], ...]
    matrix: tuple[Any, ...]
    layout: tuple[Any, ...]
    over_matrix: bool
    sliced: bool

    @classmethod
    def of(cls, value: Any) -> WrittenStrategy | None:
        """Returns ``None`` if ``value`` is not a strategy."""
        if not isinstance(value, Mapping):
            return None
        layout = value.get("layout")
        written: list[Any] = []
        for key, entry in value.items():
            several = key in ("in", "out") and isinstance(entry, list | tuple)
            written += entry if several else [entry]
        return cls(
            inputs=tuple(map(_entries, _entries(value.get("in")))),
            matrix=_entries(value.get("matrix")),
            layout=_entries(layout.get("device_matrix")) if isinstance(layout, Mapping) else (),
            over_matrix="matrix" in value or "axes" in value,
            sliced=bool(written) and all(map(_counts, written)),
        )


def _entries(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


def _counts(tensor: Any) -> bool:
    return isinstance(tensor, list | tuple) and all(type(n) is int for n in tensor)


def strategies(operators: Mapping[str, Any]) -> dict[str, WrittenStrategy]:
    """Returns the strategies of ``parallel.operators``, without values that are not strategies."""
    pairs = ((key, WrittenStrategy.of(value)) for key, value in operators.items())
    return {key: strategy for key, strategy in pairs if strategy is not None}


def entry_names(entry: Any) -> tuple[Any, ...]:
    """Returns the axis names in one entry of a tensor: one, several, or none.

    >>> entry_names("tp"), entry_names(["dp", "tp"]), entry_names(None)
    (('tp',), ('dp', 'tp'), ())
    """
    if isinstance(entry, list | tuple):
        return tuple(entry)
    return () if entry in (None, "None") else (entry,)


def named_matrix(layout: Any) -> tuple[Any, Any] | None:
    """Returns the matrix and the axis names of MindSpore's ``layout``; ``None`` if it has another form."""
    if not isinstance(layout, Mapping) or {*layout} != {"device_matrix", "alias_name"}:
        return None
    return layout["device_matrix"], layout["alias_name"]


@dataclass(frozen=True)
class _AxisNames:
    """What the entries of a strategy may be: names of axes (``alias``: what each means), or slices."""

    alias: Mapping[str, tuple[str, ...]]
    grid: Grid


@dataclass(frozen=True)
class Reading:
    """One reading of a strategy; ``None`` and missing names are left open.

    Parameters have their names in the module.
    """

    input: Axes | None
    output: Axes | None
    weights: tuple[tuple[str, Axes], ...]

    def written(self) -> str:
        """Returns the value that means exactly this reading, in the override grammar.

        >>> print(Reading((("dp",), ()), None, (("weight", (("tp",), ())),)).written())
        {weight: [tp, null], input: [dp, null]}
        """
        parts = [*self.weights, ("input", self.input), ("output", self.output)]
        return "{" + ", ".join(f"{name}: {axes_text(axes)}" for name, axes in parts if axes is not None) + "}"


def axes_text(axes: Axes) -> str:
    """
    >>> print(axes_text((("dp", "tp"), (), ("tp",))))
    [[dp, tp], null, tp]
    """
    return "[" + ", ".join(_dim_text(dim) for dim in axes) + "]"


def _dim_text(axes: tuple[str, ...]) -> str:
    if len(axes) > 1:
        return "[" + ", ".join(axes) + "]"
    return axes[0] if axes else "null"


def spans(grid: Grid) -> dict[str, int]:
    """Returns the sizes of ``dp`` and ``tp``."""
    return {DP: grid["dp_replicate"] * grid["dp_shard"], TP: grid[TP]}


def readings(
    value: Mapping[str, Any], names: Sequence[str], order: Sequence[str], grid: Grid
) -> tuple[tuple[Reading, ...], list[str]]:
    """Returns every way to read ``value`` for a module with parameters ``names``, or what is wrong with it.

    ``order``: the tensors that the entries of ``in`` mean.
    """
    wrong: list[str] = []
    axis_names = _AxisNames(_aliases(value.get("layout"), grid, wrong), grid)
    if wrong:
        return (), wrong

    # every way to read each tensor
    ways: list[list[tuple[str, Axes]]] = []
    for key, entry in value.items():
        if key == "layout":
            continue
        if key not in (*TENSORS, *names):
            own = f" and {', '.join(names)}" if names else "; the module has no parameters"
            wrong.append(f"{key}: no such key; the keys are input, output, in, out, layout{own}")
        elif key in ("in", "out"):
            places = order if key == "in" else ("output",)
            for name, tensor in _positions(key, entry, places, wrong):
                batch = name in ("input", "output")
                read = _ways(f"{key}[{name}]", tensor, axis_names, wrong, batch=batch)
                ways.append([(name, axes) for axes in read])
        else:
            read = _ways(key, entry, axis_names, wrong, batch=key in ("input", "output"))
            ways.append([(key, axes) for axes in read])
    if wrong:
        return (), wrong

    # every combination of them
    combined = [_reading(dict(choice)) for choice in product(*ways)]
    return tuple(dict.fromkeys(combined)), []


def _reading(axes: dict[str, Axes]) -> Reading:
    weights = tuple((n, a) for n, a in axes.items() if n not in TENSORS)
    return Reading(axes.get("input"), axes.get("output"), weights)


def _positions(key: str, entries: Any, places: Sequence[str], wrong: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields each entry of a list of tensors with the tensor that it means; adds problems to ``wrong``."""
    if not isinstance(entries, list | tuple) or not all(isinstance(t, list | tuple) for t in entries):
        wrong.append(f"{key}: {entries}: must be a list with one list for each tensor")
    elif len(entries) > len(places):
        wrong.append(f"{key}: {len(entries)} tensors, but the operator has {', '.join(places)}")
    else:
        yield from zip(places, entries, strict=False)


def _ways(where: str, tensor: Any, axis_names: _AxisNames, wrong: list[str], *, batch: bool) -> list[Axes]:
    """Returns every way to read the dims of one tensor; adds problems to ``wrong``.

    ``batch``: dim 0 is the samples.
    """
    if not isinstance(tensor, list | tuple):
        wrong.append(f"{where}: {tensor!r}: must be a list with one entry for each dim")
        return []

    dims = []
    for at, entry in enumerate(tensor):
        choices, text = _choices(entry, axis_names, batch=batch and at == 0)
        if text:
            wrong.append(f"{where}: {text}")
        dims.append(choices)

    # no axis may cut two dims
    ways = [axes for axes in product(*dims) if _once(axes)] if not wrong else []
    if not ways and not wrong:
        wrong.append(f"{where}: {list(tensor)}: one axis cannot cut two dims")
    return ways


def _once(axes: Axes) -> bool:
    """Returns true if no axis cuts two dims."""
    flat = [a for dim in axes for a in dim]
    return len(flat) == len(set(flat))


def _choices(entry: Any, axis_names: _AxisNames, *, batch: bool) -> tuple[list[tuple[str, ...]], str]:
    """Returns the axes that one entry can mean, or what is wrong with it."""
    if isinstance(entry, int) and not isinstance(entry, bool):
        return _slices(entry, spans(axis_names.grid), batch=batch)

    out: list[str] = []
    for n in entry_names(entry):
        if n not in axis_names.alias:
            return [], f"{n!r} is not an axis; the axes are {', '.join(axis_names.alias)}, or null"
        out += axis_names.alias[n]
    return [tuple(out)], ""


def _slices(count: int, ways: Mapping[str, int], *, batch: bool) -> tuple[list[tuple[str, ...]], str]:
    """Returns the axes that cut into ``count`` slices; ``dp`` cuts only samples."""
    if count == 1:
        return [()], ""

    fits: list[tuple[str, ...]] = []
    if batch and count == ways[DP]:
        fits.append((DP,))
    if count == ways[TP]:
        fits.append((TP,))
    if batch and count == ways[DP] * ways[TP] and min(ways.values()) > 1:
        fits.append((DP, TP))
    if fits:
        return fits, ""

    sizes = f"tp is {ways[TP]}"
    if batch:
        sizes += f", dp is {ways[DP]}"
    return [], f"{count} slices match no axis: {sizes}"


def _aliases(layout: Any, grid: Grid, wrong: list[str]) -> dict[str, tuple[str, ...]]:
    """Returns the axes that each axis name means; adds problems to ``wrong``.

    A device matrix lists sizes in row-major order over the ranks of one stage.
    """
    if layout is None:
        return {DP: (DP,), TP: (TP,)}

    # the form is a size and a name for each axis
    form = "layout: {device_matrix: [2, 2], alias_name: [dp, tp]}"
    named = named_matrix(layout)
    if named is None:
        wrong.append(f"layout: {layout!r}: must have the form {form}")
        return {}
    matrix, names = named
    good = isinstance(matrix, list | tuple) and isinstance(names, list | tuple) and len(matrix) == len(names)
    if not good or not all(isinstance(n, int) and n > 0 for n in matrix) or len(set(names)) < len(names):
        text = "every axis needs a positive size and its own name"
        wrong.append(f"layout: {matrix!r} with names {names!r}: {text}")
        return {}

    # size and stride identify an axis
    ways = spans(grid)
    if prod(matrix) != prod(ways.values()):
        wrong.append(f"layout.device_matrix: {list(matrix)}: a stage has dp {ways[DP]} x tp {ways[TP]} ranks")
        return {}
    out: dict[str, tuple[str, ...]] = {}
    inner = prod(matrix)
    known = {(prod(matrix), 1): (DP, TP), (ways[DP], ways[TP]): (DP,), (ways[TP], 1): (TP,)}
    for n, name in zip(matrix, names, strict=True):
        inner //= n
        out[str(name)] = () if n == 1 else known.get((n, inner), ())
        if n > 1 and not out[str(name)]:
            text = f"{name} ({n} ranks, {inner} apart) is neither dp ({ways[DP]} ranks, {ways[TP]} apart)"
            wrong.append(f"layout: {text} nor tp ({ways[TP]} ranks, 1 apart)")
    return out


def degree(operators: Mapping[str, Any]) -> tuple[int | None, str]:
    """Returns the size of ``tp`` that slices and device matrices imply, and why they disagree.

    The size is ``None`` if none implies one, or if they disagree.

    >>> degree({"up": {"in": [[4, 1], [1, 2]]}})
    (2, '')
    """
    sizes_of: dict[int, str] = {}
    for key, strategy in strategies(operators).items():
        # slices over tp: the last size of a device matrix, and all dims of tensors but the samples (dim 0 of
        # the first tensor)
        sizes = [*strategy.layout[-1:]]
        for at, tensor in enumerate(strategy.inputs):
            sizes += tensor[1:] if at == 0 else tensor
        for n in sizes:
            if isinstance(n, int) and not isinstance(n, bool) and n > 1:
                sizes_of.setdefault(n, key)

    if len(sizes_of) > 1:
        return None, " but ".join(f"{n} in {key}" for n, key in sizes_of.items())
    return next(iter(sizes_of), None), ""
