"""Resolves the strategies of every stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from shlex import quote

from launcher.errors import Problem, refuse
from launcher.extras.device_matrix.given_layouts import (
    KnownParams,
    conflicts,
    followed,
    input_layouts,
    operand_layouts,
    used,
)
from launcher.extras.device_matrix.hsdp import ShardedParam, at_rest
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_graph import OpGraph, OpNode
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.operator_names import operator_names
from launcher.extras.device_matrix.search.cost import CostModel, Layouts
from launcher.extras.device_matrix.search.explore import Searches, SearchResult
from launcher.extras.device_matrix.search.reasons import Reason, merged
from launcher.extras.device_matrix.sharded_graph import ShardedGraph, sharded
from launcher.extras.device_matrix.written_operator import Written
from launcher.extras.device_matrix.written_strategies import read, unmatched
from launcher.job.schema.job import Job
from launcher.plan.resolve.mode import searches
from launcher.plan.tensor_parallel.strategies_of_layouts import KEY as FILE
from launcher.plan.values.resolved import Resolved
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import bytes_text

HEAVY = frozenset(
    {
        "linear", "addmm", "mm", "embedding", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d",
    }
)  # fmt: skip
"""Operators with weights. MindSpore gives those without a strategy data parallelism."""


def assign(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    ranks: int,
    *,
    written: Mapping[int, OpStrategy],
    at_inputs: Mapping[int, TensorLayout],
    rests: Mapping[int, TensorLayout],
) -> tuple[OpStrategy, ...]:
    """Returns a strategy for each node.

    An operator without a written strategy is cut along its samples if it has weights; otherwise it follows
    the layouts of its inputs.

    Args:
        graph: the operators of a stage.
        rules: the rule of each node; ``None`` for a node that runs on full tensors.
        ranks: the number of ranks of the stage.
        written: strategies from the request, by place of the node.
        at_inputs: layouts of the graph's inputs, by value.
        rests: layouts in which other values rest, by value.
    """
    layouts = dict(at_inputs)
    out = []
    for at, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)):
        strategy = written.get(at)
        if strategy is None:
            strategy = _default(graph, node, rule, ranks=ranks, layouts=layouts)
        out.append(strategy)
        for place, value in enumerate(node.outs):
            full = TensorLayout.replicated(len(graph.values[value].shape), ranks)
            made = full if rule is None else strategy.makes(rule, place).summed()
            layouts[value] = rests.get(value, made)
    return tuple(out)


def _default(
    graph: OpGraph, node: OpNode, rule: OpRule | None, *, ranks: int, layouts: Mapping[int, TensorLayout]
) -> OpStrategy:
    if rule is None:
        return OpStrategy((ranks,))
    if node.kind in HEAVY:
        return data_parallel(rule, ranks)
    return follow_inputs(graph, node, rule, ranks=ranks, layouts=layouts)


def data_parallel(rule: OpRule, ranks: int) -> OpStrategy:
    """Cuts the first dim of the output (the samples) over all ranks, or over as many as divide it.

    >>> data_parallel(OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 12), ("k", 4), ("n", 2))), 8)
    OpStrategy(matrix=(4, 2), axes=(('m', (0,)),))
    """
    made = rule.outs[0]
    samples = made[0] if made else ""
    if not samples:
        return OpStrategy((ranks,))
    ways = gcd(rule.size[samples], ranks)
    if ways == 1:
        return OpStrategy((ranks,))
    matrix = (ways,) if ways == ranks else (ways, ranks // ways)
    return OpStrategy(matrix, ((samples, (0,)),))


def follow_inputs(
    graph: OpGraph, node: OpNode, rule: OpRule, *, ranks: int, layouts: Mapping[int, TensorLayout]
) -> OpStrategy:
    """Cuts the operator as its largest cut input is cut, and then as the other inputs are, where possible."""
    arrive = [
        (place, layouts[value])
        for place, value in enumerate(node.ins)
        if value in layouts and any(layouts[value].dims)
    ]
    if not arrive:
        return OpStrategy((ranks,))
    arrive.sort(key=lambda a: -prod(graph.values[node.ins[a[0]]].shape))
    matrix = arrive[0][1].matrix

    # letter by letter, as far as the slices divide its size; no axis cuts two letters
    axes: dict[str, tuple[int, ...]] = {}
    for place, layout in arrive:
        if layout.matrix != matrix:
            continue
        for letter, cuts in zip(rule.ins[place], layout.dims, strict=True):
            if not letter or letter in axes:
                continue
            used = {a for some in axes.values() for a in some}
            fits = _fitting([a for a in cuts if a not in used], matrix, rule.size[letter])
            if fits:
                axes[letter] = fits
    return OpStrategy(matrix, tuple(axes.items()))


def _fitting(cuts: Sequence[int], matrix: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns the longest outermost part of ``cuts`` whose slices divide ``size``."""
    out: list[int] = []
    for a in cuts:
        if size % prod(matrix[b] for b in (*out, a)):
            break
        out.append(a)
    return tuple(out)


RuleOf = Callable[[OpNode, OpGraph], OpRule | None]


@dataclass(frozen=True)
class StageGraphs:
    """The operators of one virtual stage, in training and in evaluation mode."""

    train: OpGraph
    evaluate: OpGraph


@dataclass(frozen=True)
class StageSharding:
    """One virtual stage over its ranks.

    ``written``: the strategies from the request. ``reasons``: why other operators got theirs.
    """

    train: ShardedGraph
    evaluate: ShardedGraph
    params: tuple[ShardedParam, ...]
    written: tuple[Written, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def takes(self) -> tuple[TensorSpec, ...]:
        """The parts of the inputs that a rank receives from the stage before."""
        graph = self.train.graph
        return tuple(_local(self.train, v) for v in graph.inputs)

    @property
    def gives(self) -> tuple[TensorSpec, ...]:
        """The parts of the outputs that a rank makes."""
        graph = self.train.graph
        ways = [self.train.taken[at] for at in self.train.returns]
        specs = [graph.values[v].spec for v in graph.outputs]
        return tuple(_part(s, w.layout) for s, w in zip(specs, ways, strict=True))


def _local(graph: ShardedGraph, value: int) -> TensorSpec:
    return _part(graph.graph.values[value].spec, graph.layouts[value])


def _part(spec: TensorSpec, layout: TensorLayout) -> TensorSpec:
    return replace(spec, shape=layout.local_shape(spec.shape))


@dataclass(frozen=True)
class Sharding:
    """The sharding of all virtual stages, each over ``ranks`` ranks.

    ``level``: the optimizer level of hsdp; ``None`` if replicas do not shard parameters. ``latency``: seconds
    per collective; with ``bytes_per_second`` of a rank, it predicts the time of communication. ``searched``:
    a search chose the strategies, now or before they were saved to a file. ``reasons``: explanations of
    these, a line each.
    """

    ranks: int
    level: str | None
    stages: tuple[StageSharding, ...]
    latency: float
    bytes_per_second: float
    searched: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, ShardedParam]:
        """The parameters of all stages, by first name."""
        return {p.name: p for s in reversed(self.stages) for p in s.params}


@dataclass(frozen=True)
class Terms:
    """The conditions that strategies are chosen for, besides the operators.

    ``ranks``: the number of ranks of a stage. ``class_dim``: the dim of the model's output that holds the
    classes; ``None`` if no dim does. ``costs``: the cost model of a search. ``memory``: bytes of a rank's
    device, if known.
    """

    ranks: int
    class_dim: int | None
    costs: CostModel
    memory: float | None


def resolve(
    resolved: Resolved,
    graphs: Sequence[StageGraphs],
    rule_of: RuleOf,
    terms: Terms,
    file: KnownParams | None = None,
) -> Sharding:
    """Resolves the strategies and layouts of all stages.

    Args:
        resolved: the request, with what its files decided.
        graphs: the operators of each virtual stage.
        rule_of: returns the rule of an operator, if it has one.
        terms: the conditions for strategies.
        file: layouts of parameters from a file, if the request names one.

    Raises:
        RequestError: with all problems of the strategies.
    """
    job = resolved.job
    problems: list[Problem] = []
    stages: list[StageSharding] = []
    known: dict[str, TensorLayout] = {}
    ranks = terms.ranks
    search = Searches(ranks, terms.costs, terms.memory)
    names = operator_names([g.train for g in graphs])
    arrive = input_layouts(job, [graphs[0].train.values[v].spec for v in graphs[0].train.inputs], ranks)
    for index, both in enumerate(graphs):
        place = StagePlace(index, len(graphs), names[index])
        made, wrong = _stage(
            resolved, both, rule_of, terms, search, arrive=arrive, known=known, file=file, place=place
        )
        problems += wrong
        stages.append(made)
        known |= {p.name: p.used for p in made.params if p.name not in known}
        arrive = tuple(made.train.taken[at].layout for at in made.train.returns)
    modules = [n.module for both in graphs for n in both.train.nodes]
    problems += unmatched(
        job.parallel.operators, modules, [name for each in names for name in each], resolved.strategies
    )
    refuse(list(dict.fromkeys(problems)))
    level = None if job.parallel.hsdp is None else job.parallel.hsdp.optimizer_level
    return Sharding(
        ranks=ranks,
        level=level,
        stages=tuple(stages),
        latency=terms.costs.latency,
        bytes_per_second=terms.costs.bytes_per_second,
        searched=_searched(resolved),
        reasons=tuple(_reasons(resolved, stages)),
    )


def _reasons(resolved: Resolved, stages: Sequence[StageSharding]) -> Iterator[str]:
    """Yields the reasons from the file that has the strategies, and those of this search."""
    yield from resolved.search_reasons or ()
    yield from map(str, merged(r for stage in stages for r in stage.reasons))


def _searched(resolved: Resolved) -> bool:
    """Returns true if a search, now or before the strategies were saved, chose the layouts of inputs, too."""
    return searches(resolved.job) or resolved.search_reasons is not None


@dataclass(frozen=True)
class StagePlace:
    """The place of a stage among all ``stages``, and the ``names`` of its operators."""

    index: int
    stages: int
    names: tuple[str, ...]


def _stage(
    resolved: Resolved,
    graphs: StageGraphs,
    rule_of: RuleOf,
    terms: Terms,
    search: Searches,
    *,
    arrive: Sequence[TensorLayout],
    known: Mapping[str, TensorLayout],
    file: KnownParams | None,
    place: StagePlace,
) -> tuple[StageSharding, list[Problem]]:
    """Resolves one stage.

    ``arrive``: layouts of its inputs. ``known``: layouts of parameters that an earlier stage holds, too.
    """
    job = resolved.job
    graph, ranks = graphs.train, terms.ranks
    last = place.index == place.stages - 1
    rules = tuple(rule_of(n, graph) for n in graph.nodes)
    written, problems = read(
        job.parallel.operators, graph, rules, names=place.names, ranks=ranks, origins=resolved.strategies
    )

    # a search takes the model's inputs in the layouts of their users, unless the request sets their layouts
    free = place.index == 0 and _searched(resolved) and isinstance(job.parallel.dataset_strategy, str)
    known_layouts = {} if free else dict(zip(graph.inputs, arrive, strict=True))
    of_file, wrong = _of_file(job, graph, file, operand_layouts(graph, rules, written))
    problems += wrong
    known_layouts |= of_file
    known_layouts |= {v: known[name] for name, v in graph.params if name in known}
    rests = {graph.nodes[w.node].outs[0]: w.out for w in written if w.out is not None}

    # training
    own = {w.node: w.strategy for w in written}
    if file is not None:
        own |= followed(graph, rules, of_file, own)
        config = job.parallel.operators
        own_params = {v: of_file[v] for name, v in graph.params if v in of_file and name not in known}
        problems += conflicts(
            graph,
            rules,
            written,
            known=own_params,
            path=file.path,
            config=config,
            origins=resolved.strategies,
        )
    reasons: tuple[Reason, ...] = ()
    if searches(job) and not problems:
        layouts = Layouts(rest={**known_layouts, **rests})
        got = search.propagate(graph, rules, own, layouts)
        strategies, reasons = got.strategies, got.reasons
        problems += _lacking(got, place.index, terms)
    else:
        strategies = assign(graph, rules, ranks, written=own, at_inputs=known_layouts, rests=rests)
    outputs: list[TensorLayout | None] = [None] * len(graph.outputs)
    train = sharded(graph, rules, strategies, known_layouts=known_layouts, outputs=outputs, rests=rests)
    if last:
        outputs = [_for_loss(train.layouts[v], terms.class_dim) for v in graph.outputs]
        train = sharded(graph, rules, strategies, known_layouts=known_layouts, outputs=outputs, rests=rests)

    # evaluation: the same strategies for the same operators, parameters in the layouts of training
    other = _evaluation(graphs.evaluate, train, rule_of, last=last, ranks=ranks)
    used_params = {*_parameter_names(train), *_parameter_names(other)}
    params = tuple(_param(job, train, name, v) for name, v in graph.params if name in used_params)
    return StageSharding(train, other, params, written, reasons), problems


def _of_file(
    job: Job, graph: OpGraph, file: KnownParams | None, preferred: Mapping[int, TensorLayout]
) -> tuple[dict[int, TensorLayout], list[Problem]]:
    """Returns the layouts in which operators take the parameters of the file, and problems.

    ``preferred``: layouts that written strategies take. Such a layout is used if hsdp shards it into the
    layout of the file.
    """
    out, problems = {}, []
    for name, value in graph.params:
        rest = file.rests.get(name) if file is not None else None
        if rest is None or file is None or name in graph.buffers:
            continue
        shards = job.parallel.hsdp if graph.values[value].trains else None
        layout = used(rest, graph.values[value].spec, shards, preferred.get(value))
        if layout is None:
            text = f"{file.path}: {name} is kept in {list(rest.slices)} parts, which hsdp cannot produce"
            problems.append(Problem(FILE, text, quote("parallel.hsdp=null")))
        else:
            out[value] = layout
    return out, problems


def _lacking(got: SearchResult, stage: int, terms: Terms) -> list[Problem]:
    """Returns a problem if none of the strategies of a search fits in memory."""
    if not got.lacking:
        return []
    where = f"stage {stage} needs {bytes_text(round(got.lacking))} more on each rank"
    text = f"no strategies fit: {where} than {bytes_text(round(terms.memory or 0))}"
    return [Problem("cluster.memory_gb", text)]


def _for_loss(layout: TensorLayout, class_dim: int | None) -> TensorLayout:
    """Returns the layout in which the loss takes the output.

    It may be cut along samples, and along classes if these are the last dim. An output of one number per
    sample, whose last dim is its samples, is not cut, because that dim must not pass for classes.
    """
    if layout.dims and class_dim == len(layout.dims) - 1:
        return layout
    if len(layout.dims) == 1:
        return TensorLayout(layout.matrix, ((),))
    return TensorLayout(layout.matrix, (*layout.dims[:1], *((),) * (len(layout.dims) - 1)))


def _parameter_names(graph: ShardedGraph) -> Iterator[str]:
    """Yields the names of the parameters and buffers that a graph takes or changes."""
    yield from (name for name, v in graph.graph.params if graph.users[v])
    yield from (name for name, _ in graph.graph.changes)


def _param(job: Job, train: ShardedGraph, name: str, value: int) -> ShardedParam:
    spec = train.graph.values[value].spec
    used = train.layouts[value]
    ways = train.users[value]
    if len(ways) == 1 and train.arrives(ways[0]):
        used = ways[0].layout  # the same layout, over the matrix that the axes of the terms belong to
    shards = job.parallel.hsdp if train.graph.values[value].trains else None
    return ShardedParam(name, spec, used, at_rest(used, spec, shards), train.summed_later(value))


def _evaluation(
    graph: OpGraph,
    train: ShardedGraph,
    rule_of: RuleOf,
    *,
    last: bool,
    ranks: int,
) -> ShardedGraph:
    """Returns the graph of evaluation, with the strategies and parameter layouts of training.

    The outputs of the last stage are full tensors, as evaluation needs them.
    """
    params = {name: train.layouts[v] for name, v in train.graph.params}
    at_inputs = {v: train.layouts[t] for v, t in zip(graph.inputs, train.graph.inputs, strict=True)}
    param_layouts = {v: params[name] for name, v in graph.params if name in params}
    rules = train.rules if graph is train.graph else tuple(rule_of(n, graph) for n in graph.nodes)
    strategies = assign(
        graph, rules, ranks, written=_same(graph, rules, train), at_inputs=at_inputs, rests={}
    )
    outputs = [train.taken[at].layout for at in train.returns]
    if last:
        outputs = [TensorLayout.replicated(len(graph.values[v].shape), ranks) for v in graph.outputs]
    return sharded(graph, rules, strategies, known_layouts={**at_inputs, **param_layouts}, outputs=outputs)


def _same(graph: OpGraph, rules: Sequence[OpRule | None], train: ShardedGraph) -> dict[int, OpStrategy]:
    """Returns the strategies of operators that training runs, too: the same call in the same module."""
    theirs = dict(zip(_calls(train.graph), zip(train.rules, train.strategies, strict=True), strict=True))
    out = {}
    for at, (call, rule) in enumerate(zip(_calls(graph), rules, strict=True)):
        if call in theirs and rule is not None and theirs[call][0] == rule:
            out[at] = theirs[call][1]
    return out


def _calls(graph: OpGraph) -> list[tuple[str, str, int]]:
    """Identifies each operator by its module, its kind, and its number among those of its kind there."""
    seen: Counter[tuple[str, str]] = Counter()
    out = []
    for n in graph.nodes:
        seen[n.module, n.kind] += 1
        out.append((n.module, n.kind, seen[n.module, n.kind]))
    return out
