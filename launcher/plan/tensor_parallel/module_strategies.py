"""The strategy of each module over the axis ``tp``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.plan.tensor_parallel.strategy_lookup import StrategyLookup, written_under
from launcher.plan.tensor_parallel.strategy_reader import DP, TP, Axes, Reading, axes_text, readings
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import ModelStructure, Param
from launcher.plan.values.module_names import no_such_module
from launcher.plan.values.resolved import NO_FILE, Origins, StrategyOrigin

KEY = "parallel.operators"
LINEAR, ADAPTED = "linear", "linear with adapters"
LINEARS = {kind: {0: "column", 1: "row"} for kind in (LINEAR, ADAPTED)}
MODES = LINEARS | {"embedding": {0: "vocabulary", 1: "hidden"}}
"""The name of a layer's mode by the dim of its weight that is cut."""


@dataclass(frozen=True)
class Operator:
    """A module with its strategy. ``kind`` is linear, embedding, norm, elementwise or module.

    ``weights`` has every parameter that the module owns, by its name in the module. ``input`` and ``output``
    are as requested: ``None`` takes the input as it arrives and leaves the output as it is. ``key`` is the
    name or glob of the strategy, ``where`` the setting to name in problems.
    """

    module: str
    kind: str
    key: str
    weights: tuple[tuple[str, Axes], ...]
    input: Axes | None
    output: Axes | None
    where: str = ""

    @property
    def mode(self) -> str:
        """The mode: column, row, vocabulary or hidden; "" if no weight is cut."""
        cut = tp_dim(dict(self.weights).get("weight", ()))
        return "" if cut is None else MODES[self.kind][cut]


@dataclass(frozen=True)
class _Module:
    """A module to apply a strategy to; ``own``: its parameters, without those of its submodules."""

    name: str
    kind: str
    own: tuple[Param, ...]


def tp_dim(axes: Axes) -> int | None:
    """Returns the dim that ``tp`` cuts, or ``None``."""
    return next((d for d, names in enumerate(axes) if TP in names), None)


def splits(operators: Sequence[Operator]) -> dict[str, Axes]:
    """Returns the axes that cut each parameter's dims, by full name, for parameters that ``tp`` cuts."""
    return {f"{o.module}.{n}": axes for o in operators for n, axes in o.weights if tp_dim(axes) is not None}


def resolve(
    config: Mapping[str, Any], skeleton: ModelStructure, grid: Grid, origins: Origins = NO_FILE
) -> tuple[tuple[Operator, ...], list[Problem]]:
    """Returns one operator for each module that ``config`` names, in definition order, or the problems.

    ``origins``: the files that have strategies of ``config``. An exact name takes precedence over globs, a
    later key over earlier ones, and each of them over a file.
    """
    config, origins, problems = unwrapped(config, skeleton, origins)
    problems += [p for key, value in config.items() for p in _form(key, value, skeleton, origins.get(key))]
    if problems:
        return (), problems

    kinds, lookup = dict(skeleton.kinds), StrategyLookup.from_config(config, origins)
    owned: dict[str, list[Param]] = {}
    for p in skeleton.params:
        if not p.buffer:
            owned.setdefault(p.name.rpartition(".")[0], []).append(p)

    out = []
    complained: set[tuple[str, str]] = set()
    for name in skeleton.modules:
        key = lookup.key(name)
        if key is None:
            continue
        module = _Module(name, kinds.get(name, "module"), tuple(owned.get(name, ())))
        got = _operator(module, key, config[key], grid, origins.get(key))
        if isinstance(got, Operator):
            out.append(got)
        elif (got.key, got.text) not in complained:  # a glob over 80 layers is one problem
            complained.add((got.key, got.text))
            problems.append(got)
    return tuple(out), problems or _ties(out, skeleton)


def unwrapped(
    config: Mapping[str, Any], skeleton: ModelStructure, origins: Origins
) -> tuple[dict[str, Any], Origins, list[Problem]]:
    """Returns ``config`` and ``origins`` without the prefixes that MindSpore's wrappers add to module names.

    Entries of a file that are outside the model are dropped: the data set, the loss, the step.
    """
    outside = {key for key in config if key in origins and origins[key].outside}
    out = {key: value for key, value in config.items() if key not in outside}
    files = {key: origin for key, origin in origins.items() if key not in outside}
    problems: list[Problem] = []
    from_names: dict[str, str] = {}
    for name, value in config.items():
        if name not in outside:
            continue
        origin = origins[name]
        parts = name.split(".")
        tails = (".".join(parts[at:]) for at in range(len(parts)))
        module = next((tail for tail in tails if tail in skeleton.modules), None)

        # an entry without values is code in a forward; it belongs to the model if it names a module
        if not value:
            if module is not None:
                text = f"{origin.key} is called in its own forward, but only modules can have strategies"
                problems.append(strategy_problem(name, origin, text))
        elif module is None:
            problems.append(strategy_problem(name, origin, str(no_such_module(name, skeleton))))
        elif module in from_names:
            problems.append(
                strategy_problem(name, origin, f"means module {module}, and so does {from_names[module]}")
            )
        else:
            from_names[module] = name
            if module not in out:
                out[module] = value
                files[module] = origin
    return out, files, problems


def _form(key: str, value: Any, skeleton: ModelStructure, origin: StrategyOrigin | None) -> list[Problem]:
    if not isinstance(value, Mapping) or not value:
        text = f"{value!r}: not a strategy such as {{weight: [tp, null]}} or {{in: [[1, 2], [2, 1]]}}"
        return [strategy_problem(key, origin, text)]
    missing = no_such_module(key, skeleton)
    cure = "" if origin is not None else quote(f"~{KEY}.{key}")
    return [strategy_problem(key, origin, missing, cure)] if missing else []


def strategy_problem(key: str, origin: StrategyOrigin | None, text: str, cure: str = "") -> Problem:
    """Returns a problem of one strategy; if it comes from a file, the problem names the file."""
    if origin is not None:
        return Problem(origin.setting, f"{origin.path}: {key}: {text}", cure)
    return Problem(f"{KEY}.{key}", text, cure)


def _operator(
    module: _Module, key: str, value: Mapping[str, Any], grid: Grid, origin: StrategyOrigin | None
) -> Operator | Problem:
    # all ways to read the strategy as written
    names = tuple(p.name.rpartition(".")[2] for p in module.own)
    got = [readings(value, names, order, grid) for order in _orders(module.kind, names)]
    distinct = list(dict.fromkeys(r for readable, _ in got for r in readable))
    if not distinct:
        return strategy_problem(key, origin, "; ".join(got[0][1]))

    # exactly one of them has to fit the module
    ways = [w for r in distinct for w in _orientations(r, module.kind, value)]
    tried = [(w, *_complete(w, module, listed="in" in value)) for w in ways]
    good = {o: None for _, o, why in tried if o is not None and not why}
    if not good:
        text = " and ".join(dict.fromkeys(f"{w.written()}: {why}" for w, _, why in tried)) or "says nothing"
        return strategy_problem(
            key, origin, text if len(tried) < 2 else f"no way to read it fits the module: {text}"
        )
    if len(good) > 1:
        both = " or as ".join(w.written() for w in good)
        cure = quote(f"{KEY}.{key}={next(iter(good)).written()}")
        return strategy_problem(key, origin, f"can be read as {both}; write one of them", cure)

    reading = next(iter(good))
    uneven = _uneven(module, reading, grid)
    if uneven is not None:
        return uneven
    return Operator(
        module=module.name,
        kind=module.kind,
        key=written_under(module.name, key, origin),
        weights=reading.weights,
        input=reading.input,
        output=reading.output,
        where=origin.setting if origin is not None else f"{KEY}.{key}",
    )


def _orders(kind: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Returns the tensors that the entries of ``in`` may mean, in order.

    The table of an embedding may come first, as in MindSpore's Gather.
    """
    first = ("input", *names)
    return (first, (*names, "input")) if kind == "embedding" else (first,)


def _orientations(reading: Reading, kind: str, value: Mapping[str, Any]) -> list[Reading]:
    """Returns the readings of a linear weight that is written by position.

    Its dims may mean (out, in), as in torch, or (in, out), as in MindSpore's MatMul.
    """
    weights = dict(reading.weights)
    if "in" not in value or kind not in LINEARS or len(weights.get("weight", ())) != 2:
        return [reading]
    turned = {**weights, "weight": weights["weight"][::-1]}
    return [reading, Reading(reading.input, reading.output, tuple(turned.items()))]


def _complete(reading: Reading, module: _Module, *, listed: bool) -> tuple[Reading | None, str]:
    """Returns the reading with the axes of every parameter, or why the module cannot be cut so.

    ``listed``: it was written by position.
    """
    kind = module.kind
    written = dict(reading.weights)
    full: dict[str, Axes] = {}

    # each parameter alone
    for p in module.own:
        name = p.name.rpartition(".")[2]
        axes = written.get(name)
        if axes is not None and len(axes) != len(p.spec.shape):
            return None, f"{name} has shape {list(p.spec.shape)}, not {len(axes)} dims"
        if axes is not None and any(DP in dim for dim in axes):
            does = "parallel.hsdp shards weights over data-parallel ranks"
            return None, f"{name} cannot be cut over dp here; {does}"
        full[name] = axes if axes is not None else ((),) * len(p.spec.shape)

    # the parameters together, and with input and output
    cut = [n for n, axes in full.items() if tp_dim(axes) is not None]
    if cut and kind not in MODES:
        return None, f"{cut[0]} is cut over tp, but only input and output of a {kind} can be cut"
    if why := _activations(reading, kind, tp_dim(full.get("weight", ())), listed):
        return None, why

    # a bias is cut like the outputs, and added once if they are summed; an adapter is cut like its weight
    if kind in LINEARS:
        for name, expected in _beside(full["weight"]).items():
            if written.get(name, expected) != expected:
                text = f"{name} {axes_text(full[name])} does not fit weight"
                return None, f"{text} {axes_text(full['weight'])}"
            full |= {name: expected} if name in full else {}
    return Reading(reading.input, reading.output, tuple(full.items())), ""


def _beside(weight: Axes) -> dict[str, Axes]:
    """Returns how the other parameters of a linear layer are cut, those of its adapter included."""
    return {"bias": weight[:1], "lora_A": ((), weight[1]), "lora_B": (weight[0], ())}


def _activations(reading: Reading, kind: str, weight: int | None, listed: bool) -> str:
    """Returns why the requested input and output do not fit a weight cut on dim ``weight``; "" if they do.

    ``listed``: the strategy was written by position.
    """
    for axes, name in ((reading.input, "input"), (reading.output, "output")):
        if axes is not None and any(DP in dim for dim in axes[1:]):
            return f"{name} {axes_text(axes)}: dp can only cut dim 0, the samples"
        if axes is not None and any(dim == (TP, DP) for dim in axes):
            return f"{name} {axes_text(axes)}: dp must cut the samples before tp"

    # the input
    input_axes = reading.input
    into = None if input_axes is None else tp_dim(input_axes)
    last = input_axes is not None and into == len(input_axes) - 1
    if kind in LINEARS:
        if weight == 1 and input_axes is not None and not last:
            return f"input {axes_text(input_axes)} does not fit a weight that is cut over tp on its inputs"
        if weight != 1 and last:
            described = axes_text(input_axes or ())
            return (
                f"input {described} is cut over tp on its features, so the weight must be cut on its inputs"
            )
    if listed and kind in LINEARS and weight == 0 and into is not None:
        return f"input {axes_text(input_axes or ())}: tp cannot cut both the samples and the outputs"
    if listed and kind == "embedding" and weight is None and into is not None:
        return f"input {axes_text(input_axes or ())}: tp can cut the table, not its indices"
    if kind == "embedding" and weight is not None and into is not None:
        return f"input {axes_text(input_axes or ())}: every rank needs all indices for its part of the table"

    # the output
    output_axes, cut_out = reading.output, {**dict.fromkeys(LINEARS, 0), "embedding": 1}.get(kind)
    if output_axes is not None and weight is not None and weight == cut_out:
        out = tp_dim(output_axes)
        if out is not None and out != len(output_axes) - 1:
            advice = "the weight cuts it on the last dim; it can stay cut or be gathered"
            return f"output {axes_text(output_axes)}: {advice}"
    return ""


def _uneven(module: _Module, reading: Reading, grid: Grid) -> Problem | None:
    shapes = {p.name.rpartition(".")[2]: p.spec.shape for p in module.own}
    for name, axes in reading.weights:
        d = tp_dim(axes)
        if d is not None and shapes[name][d] % grid[TP]:
            size = shapes[name][d]
            text = f"{module.name}.{name} has {size} on dim {d}, which is not divisible by tp={grid[TP]}"
            fits = max(n for n in range(1, grid[TP] + 1) if size % n == 0)
            return Problem(f"parallel.grid.{TP}", text, f"parallel.grid.{TP}={fits}")
    return None


def _ties(operators: Sequence[Operator], skeleton: ModelStructure) -> list[Problem]:
    """Returns the problems of tensors that are cut differently under two names."""
    cuts = splits(operators)
    first: dict[str, tuple[str, Axes]] = {}
    out = []
    for p in skeleton.params:
        axes = cuts.get(p.name, ((),) * len(p.spec.shape))
        name, other = first.setdefault(p.same_as, (p.name, axes))
        if other != axes:
            here, there = axes_text(axes), axes_text(other)
            text = f"{p.name} is the same tensor as {name}, but it is cut {here}, and {name} is cut {there}"
            uncut, cut = (name, axes) if tp_dim(other) is None else (p.name, other)
            out.append(Problem(KEY, text, quote(f"{KEY}.{uncut}={axes_text(cut)}")))
    return out


Cut = int | None
"""The dim of an activation that ``tp`` cuts; ``None`` if every rank has the full tensor."""
