"""Layouts that are given: those of parameters in a file, and those of the model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import gcd, prod
from shlex import quote
from typing import Any

from launcher.errors import Problem, refuse
from launcher.extras.device_matrix.hsdp import at_rest, global_layout
from launcher.extras.device_matrix.layout import TensorLayout, primes
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.written_dims import (
    UnfitError,
    device_matrix,
    named_axes,
    named_layout,
    nearest_slices,
    over_ranks,
    sliced_layout,
    text,
)
from launcher.extras.device_matrix.written_operator import Written
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp
from launcher.plan.resolve.dataset_strategy import written
from launcher.plan.tensor_parallel.module_strategies import strategy_problem
from launcher.plan.tensor_parallel.strategies_of_layouts import KEY, ParamLayouts, cut_text
from launcher.plan.values.layout import Layout, common_axes, rank_spans, within
from launcher.plan.values.resolved import Origins
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class KnownParams:
    """The layouts of the file at ``path``; ``rests``: the layout at rest of each parameter, by first name."""

    path: str
    rests: Mapping[str, TensorLayout]


def over_stage(file: ParamLayouts, firsts: Mapping[str, str], ranks: int) -> KnownParams | list[Problem]:
    """Returns the layouts of ``file`` on the ``ranks`` of a stage, or the problems with them.

    ``firsts`` maps every name of a parameter to its first name.
    """
    problems = []
    out: dict[str, TensorLayout] = {}
    for name, layout in file.layouts.items():
        mine = _of_stage(layout, ranks)
        if mine is None:
            text = f"{file.path}: {name} is cut {cut_text(layout)}, but a stage has {ranks} ranks"
            text += "; use the ranks per stage with which the file was written, or leave the file out"
            problems.append(Problem(KEY, text))
        elif not mine.divides(layout.shape):
            text = (
                f"{file.path}: {name} is cut {cut_text(layout)}, which does not divide {list(layout.shape)}"
            )
            why = (
                "tensors over device matrices have equal parts; leave the file out, or cut this dim otherwise"
            )
            problems.append(Problem(KEY, f"{text}; {why}"))
        elif out.setdefault(firsts[name], mine).canonical != mine.canonical:
            text = f"{file.path}: {name} is the same tensor as {firsts[name]}, but is cut differently"
            problems.append(Problem(KEY, f"{text}; give both names one layout"))
    return problems or KnownParams(file.path, out)


def _of_stage(layout: Layout, ranks: int) -> TensorLayout | None:
    """Returns the layout on the ranks of one stage; ``None`` if it does not fit them.

    The axes of the device matrix are the spans of ranks that cut dims, and the gaps between them.

    >>> from launcher.plan.values.grid import Grid
    >>> _of_stage(Layout(Grid.of(pp=2, x=2, y=4), (8, 8), (("y",), ())), 8)
    TensorLayout(matrix=(2, 4), dims=((1,), ()), partial=())
    >>> _of_stage(Layout(Grid.of(x=3, y=4), (8,), (("y",),)), 6) is None
    True
    """
    cuts = rank_spans(layout)
    axes = common_axes(cuts, ranks)
    if axes is None or any(span.end > ranks for dim in cuts for span in dim):
        return None
    matrix = tuple(axis.size for axis in axes) or (ranks,)
    return TensorLayout(matrix, tuple(tuple(a for span in dim for a in within(span, axes)) for dim in cuts))


def used(
    rest: TensorLayout, spec: TensorSpec, hsdp: Hsdp | None, preferred: TensorLayout | None = None
) -> TensorLayout | None:
    """Returns the layout in which operators take a parameter that is kept in the layout ``rest``.

    That is the layout which hsdp shards along dim 0 into ``rest``; ``None`` if there is none. ``preferred``:
    the layout that an operator takes.
    """
    if preferred is not None and at_rest(preferred, spec, hsdp).canonical == rest.canonical:
        return preferred
    if hsdp is None:
        return rest
    for fine in _refined(rest):
        first = fine.dims[0] if fine.dims else ()
        for n in range(len(first) + 1):
            gathered = TensorLayout(fine.matrix, (first[:n], *fine.dims[1:]) if fine.dims else ())
            for each in (gathered.canonical, gathered):
                if at_rest(each, spec, hsdp).canonical == rest.canonical:
                    return each
    return None


def _refined(layout: TensorLayout) -> Iterator[TensorLayout]:
    """Yields ``layout`` over axes of prime sizes, for every order of the prime factors of each axis.

    >>> [fine.matrix for fine in _refined(TensorLayout((6,), ((0,),)))]
    [(2, 3), (3, 2)]
    """
    for parts in product(*map(_orders, layout.matrix)):
        starts = [0, *accumulate(map(len, parts))]
        axes = [tuple(range(lo, hi)) for lo, hi in pairwise(starts)]
        dims = tuple(tuple(b for a in dim for b in axes[a]) for dim in layout.dims)
        yield TensorLayout(tuple(n for part in parts for n in part), dims)


def _orders(n: int) -> list[tuple[int, ...]]:
    """Returns all orders of the prime factors of ``n``."""
    return [(p, *rest) for p in sorted({*primes(n)}) for rest in _orders(n // p)] or [()]


def followed(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    known: Mapping[int, TensorLayout],
    written: Mapping[int, OpStrategy],
) -> dict[int, OpStrategy]:
    """Returns strategies of operators that take parameters with ``known`` layouts and have none ``written``.

    Such an operator is cut like its largest known parameter. Ranks that repeat the parameter get different
    samples.
    """
    params = {value for _, value in graph.params}
    out = {}
    for at, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)):
        places = [i for i, value in enumerate(node.ins) if value in known]
        if rule is None or at in written or not places:
            continue
        largest = max(places, key=lambda i: (prod(graph.values[node.ins[i]].shape), -i))
        layout = known[node.ins[largest]]
        axes = dict[str, tuple[int, ...]]()
        for letter, cut in zip(rule.ins[largest], layout.dims, strict=True):
            if letter and cut and rule.size[letter] % prod(layout.matrix[a] for a in cut) == 0:
                axes[letter] = cut

        # samples: dim 0 of the first tensor that is not a parameter
        first = next((i for i, v in enumerate(node.ins) if v not in params and rule.ins[i]), None)
        samples = rule.ins[first][0] if first is not None else ""
        if samples and samples not in axes:
            axes[samples] = _dividing(layout, axes, rule.size[samples])
        out[at] = OpStrategy(layout.matrix, tuple((letter, cut) for letter, cut in axes.items() if cut))
    return out


def _dividing(layout: TensorLayout, axes: Mapping[str, tuple[int, ...]], size: int) -> tuple[int, ...]:
    """Returns the unused axes whose slices together divide ``size``."""
    taken = {a for cut in axes.values() for a in cut}
    out: list[int] = []
    for a in range(len(layout.matrix)):
        if a not in taken and size % prod(layout.matrix[b] for b in (*out, a)) == 0:
            out.append(a)
    return tuple(out)


def operand_layouts(
    graph: OpGraph, rules: Sequence[OpRule | None], written: Sequence[Written]
) -> dict[int, TensorLayout]:
    """Returns the layouts in which operators with written strategies take values.

    If a value is taken in several layouts, the first one counts.
    """
    out: dict[int, TensorLayout] = {}
    for w in written:
        rule = rules[w.node]
        assert rule is not None
        for place, value in enumerate(graph.nodes[w.node].ins):
            out.setdefault(value, w.strategy.takes(rule, place))
    return out


def conflicts(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    written: Sequence[Written],
    *,
    known: Mapping[int, TensorLayout],
    path: str,
    config: Mapping[str, Any],
    origins: Origins,
) -> Iterator[Problem]:
    """Yields a problem for each parameter whose first operator takes it in a layout unlike the file's.

    Further operators may take other layouts, because the parameter is redistributed for them.
    """
    first = {value: at for at in reversed(range(len(graph.nodes))) for value in graph.nodes[at].ins}
    names = {value: name for name, value in graph.params}
    reported: set[str] = set()  # a strategy of many modules is reported once
    for w in written:
        if w.key in reported:
            continue
        rule, node = rules[w.node], graph.nodes[w.node]
        assert rule is not None
        for place, value in enumerate(node.ins):
            if value not in known or first[value] != w.node:
                continue
            if w.strategy.takes(rule, place).canonical == known[value].canonical:
                continue
            spec = graph.values[value].spec
            mine, theirs = (
                cut_text(global_layout(layout, spec, 1, (0,)))
                for layout in (w.strategy.takes(rule, place), known[value])
            )
            text = f"{names[value]} is cut {mine} here, and {theirs} in {path} of {KEY}"
            cure = quote(f"~parallel.operators.{w.key}") if w.key in config else ""
            reported.add(w.key)
            yield strategy_problem(w.key, origins.get(w.key), text, cure)
            break


DATASET_STRATEGY = "parallel.dataset_strategy"


def input_layouts(job: Job, specs: Sequence[TensorSpec], ranks: int) -> tuple[TensorLayout, ...]:
    """Returns the layout of each input of the model. Raises ``RequestError`` if one does not fit.

    Every rank reads full samples and cuts its parts out of them, without communication.
    """
    strategy = job.parallel.dataset_strategy
    if strategy == "full_batch":
        return tuple(TensorLayout.replicated(len(s.shape), ranks) for s in specs)
    if strategy == "data_parallel":
        return tuple(_samples(s, ranks) for s in specs)
    problems: list[Problem] = []
    out = []
    for place, spec in enumerate(specs):
        try:
            out.append(_layout(strategy, place, spec.shape, ranks))
        except UnfitError as error:
            problems.append(Problem(DATASET_STRATEGY, str(error), _cure(strategy, place, spec.shape, ranks)))
    refuse([*problems, *_target(strategy, len(specs), ranks)])
    return tuple(out)


def _layout(strategy: Any, place: int, shape: tuple[int, ...], ranks: int) -> TensorLayout:
    where = f"input {place}"
    if not isinstance(strategy, Mapping):
        return sliced_layout(where, strategy[place], shape, ranks)
    axes = device_matrix(strategy["matrix"], strategy["axes"], ranks)
    return named_layout(where, strategy["in"][place], shape, axes)


def _target(strategy: Any, place: int, ranks: int) -> list[Problem]:
    """Returns a problem if the entry of the target is malformed.

    Targets are cut as the loss takes them, whatever the entry says.
    """
    try:
        if isinstance(strategy, Mapping):
            dims = strategy["in"][place]
            named_axes("target", dims, dims, device_matrix(strategy["matrix"], strategy["axes"], ranks))
        else:
            over_ranks(f"target: {text(strategy[place])}: ", strategy[place], ranks)
    except UnfitError as error:
        return [Problem(DATASET_STRATEGY, str(error))]
    return []


def _cure(strategy: Any, place: int, shape: tuple[int, ...], ranks: int) -> str:
    """Returns the override with the most slices that fit; "" if these cut nothing, or for named axes."""
    if isinstance(strategy, Mapping):
        return ""
    nearest = tuple(nearest_slices(strategy[place], shape, ranks))
    if prod(nearest) == 1:  # the user did not mean to cut nothing
        return ""
    return quote(f"{DATASET_STRATEGY}={written((*strategy[:place], nearest, *strategy[place + 1 :]))}")


def _samples(spec: TensorSpec, ranks: int) -> TensorLayout:
    ways = gcd(spec.shape[0], ranks) if spec.shape else 1
    if ways == 1:
        return TensorLayout.replicated(len(spec.shape), ranks)
    matrix = (ways,) if ways == ranks else (ways, ranks // ways)
    return TensorLayout(matrix, ((0,), *((),) * (len(spec.shape) - 1)))
