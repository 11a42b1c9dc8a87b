"""Builds the graph of a model: its calls, with their costs and their effects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from launcher.errors import RequestError
from launcher.parallel.cost.kernels import ForwardMeter
from launcher.parallel.cost.memory import BackwardMeter, Measured, product
from launcher.parallel.dispatch.containers import NamedFunction, Rebuilt, tensors
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.state_across_passes import backward_reads
from launcher.parallel.trace.code_between_modules import (
    NO_COST,
    RUNNING,
    Tracer,
    call_text,
    follow,
    modal,
    refusing,
    trace,
    trace_ours,
)
from launcher.parallel.trace.forward_observer import ForwardObserver, watching
from launcher.parallel.trace.memory_and_gradients import GraphNodeGradients, gradients, memory
from launcher.parallel.trace.model_structure import skeleton
from launcher.parallel.trace.run_module import Observers, needs_values, run_module
from launcher.parallel.trace.state_between_forwards import (
    drifting,
    moved_by_backwards,
    moving,
    not_restored,
)
from launcher.parallel.trace.tensor_specs import memory_dims, meta, output_specs, spec, specs
from launcher.plan.cut.stages import covers
from launcher.plan.cut.uncut_modules import units
from launcher.plan.values.model_graph import (
    Backward,
    Effects,
    Graph,
    ModelStructure,
    Node,
    Segment,
)
from launcher.plan.values.module_names import owner, prefixes
from launcher.plan.values.operations import Operations, total
from launcher.plan.values.tensor_spec import TensorSpec

KINDS = {"placeholder": "input", "get_attr": "param", "call_module": "module", "output": "output"}


def graph(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[TensorSpec], ours: bool = False
) -> Graph:
    """Traces the glue of ``model`` between ``leaves`` for one micro batch of ``inputs``.

    ``ours``: a model of this package, which is known to do the same each time.
    """
    known = skeleton(model)
    traced = trace_ours if ours else trace
    tracer = traced(model, leaves, meta(inputs), _loaded(known, model))
    made = facts(tracer, known)
    moved = tracer.watch.moved or made.value_readers  # a branch on a value may change state
    made = _remembering(made, model, inputs) if moved and not ours else made
    return made if ours else _drifting(_with_backward_reads(made, model, inputs), model, inputs)


def piece(model: nn.Module, leaves: frozenset[str], inputs: Sequence[TensorSpec]) -> Graph:
    """Traces ``inputs`` of another length; ``model`` has passed the checks of ``graph``."""
    known = skeleton(model)
    return facts(follow(model, leaves, meta(inputs), _loaded(known, model)), known)


def one_sample_more(
    model: nn.Module, leaves: frozenset[str] | None, inputs: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...] | None:
    """Returns the output specs for one sample more than ``inputs``, or ``None`` if the model fails then."""
    more = [replace(t, shape=(t.shape[0] + 1, *t.shape[1:])) for t in inputs]
    try:
        made = _single_node(model, skeleton(model), more)[0] if leaves is None else piece(model, leaves, more)
    except RequestError:
        return None
    return made.nodes[-1].out


def flops(model: nn.Module, leaves: frozenset[str], inputs: Sequence[TensorSpec]) -> int:
    """Returns the flops of one forward; ``model`` is known to do the same each time."""
    return sum(flops for _, flops, _ in follow(model, leaves, meta(inputs)).costs.values())


def facts(tracer: Tracer, known: ModelStructure) -> Graph:
    """Returns the traced graph as plain values."""
    # first what was observed in the forward: measuring a backward runs modules again and may change them
    watched = _watched(tracer.watch, known, _returned(tracer), tracer.meter)

    # one node for each node of the trace
    out = []
    backwards = BackwardMeter()
    spaces = memory(tracer)
    arriving = gradients(tracer, spaces)
    for n in tracer.graph.nodes:
        target = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))

        value = tracer.values[n]
        made, packed, keys = output_specs(value) if n.op == "output" else (*specs(value), ())
        if n.op != "output" and any(tracer.watch.effects.is_sparse(t) for t in tensors(value)):
            made, packed = None, False  # stages send dense tensors
        if isinstance(n.target, Rebuilt):
            made, packed = None, False  # its tensors are sent, and each stage rebuilds it
        saved, flops, operations = tracer.costs.get(n, NO_COST)

        node = Node(
            name=n.name,
            kind=KINDS.get(n.op, "glue"),
            target=target,
            inputs=tuple(i.name for i in n.all_input_nodes),
            out=made,
            packed=packed,
            saved=saved,
            flops=flops,
            backward=_backward(tracer, n, backwards),
            reads=spaces[n].reads,
            lies=spaces[n].lies,
            writes=spaces[n].writes,
            trains=arriving[n].inputs,
            idle=arriving[n].idle,
            text=call_text(n),
            operations=operations,
            keys=keys,
            dims=memory_dims(value),
        )
        out.append(node)

    graph = Graph(tuple(out), **watched)
    late = dict.fromkeys(name for aged in tracer.aged for name in _other_gradients(tracer, aged, arriving))
    graph = replace(graph, effects=replace(graph.effects, late_gradients=tuple(late)))
    other = tracer.evaluation
    return graph if other is None else _evaluated(graph, _effects(other.watch, _returned(other), other.meter))


def _other_gradients(
    tracer: Tracer, aged: Tracer, arriving: Mapping[fx.Node, GraphNodeGradients]
) -> Iterator[str]:
    """Yields the values that get a gradient in only one of two traces of the same code."""
    later = gradients(aged, memory(aged))
    for n, m in zip(tracer.graph.nodes, aged.graph.nodes, strict=False):
        yield from arriving[n].inputs ^ later[m].inputs
        pair = tensors(tracer.values[n]), tensors(aged.values[m])
        learns = [[t.requires_grad for t in some] for some in pair]
        if learns[0] != learns[1] or arriving[n].idle != later[m].idle:
            yield n.name


def _backward(tracer: Tracer, node: fx.Node, backwards: BackwardMeter) -> Backward:
    """Returns the cost of a node's backward."""
    saved, _, forward = tracer.costs.get(node, NO_COST)
    if node.op == "call_module":
        seen = backwards.measure(*tracer.called(node))
        return seen.backward if seen is not None else Backward(kept=saved, operations=forward.backward)
    if isinstance(node.target, NamedFunction):
        return replace(product(node.target.func, *tracer.arguments_of(node)), operations=forward.backward)
    return Backward(operations=forward.backward)


def _returned(tracer: Tracer) -> Any:
    (end,) = tracer.graph.find_nodes(op="output")
    return tracer.values[end]


def _evaluated(graph: Graph, other: Effects) -> Graph:
    """Returns ``graph`` with the effects of a forward in evaluation mode."""
    seen = graph.effects
    world = tuple(dict.fromkeys((*seen.world, *other.world)))
    draws = seen.global_draws or other.global_draws
    versions = tuple(dict.fromkeys((*seen.versions, *other.versions)))
    effects = replace(
        seen,
        evaluated=other.changes,
        mixed=other.mixed,
        world=world,
        versions=versions,
        global_draws=draws,
        eval_changes_state=other.eval_changes_state,
    )
    return replace(graph, effects=effects)


def _loaded(known: ModelStructure, model: nn.Module) -> tuple[str, ...]:
    """Returns the units that have parameters; those that are recomputed together count as one."""
    with_params = {module for p in known.params for module in prefixes(p.name)[:-1]}
    loaded = [u for u in units(known) if u in with_params]
    regions = [name for name, module in model.named_modules() if hasattr(module.forward, "recomputed")]
    regions_of = {u: next((r for r in regions if covers(r, u)), u) for u in loaded}
    return tuple(dict.fromkeys(regions_of.values()))


def _watched(
    watch: ForwardObserver, known: ModelStructure, output: Any, meter: ForwardMeter
) -> dict[str, Any]:
    """Returns the fields of a graph that ``watch`` knows."""

    def among(seen: Collection[str]) -> tuple[str, ...]:
        return tuple(m for m in ("", *known.modules) if m in seen)

    scopes = ((p.name, watch.scopes.get(p.name)) for p in known.params if not p.buffer)
    return {
        # which modules use which parameters, and when modules are called
        "scopes": tuple((name, scope) for name, scope in scopes if scope != owner(name)),
        "chains": watch.chains(),
        "calls": tuple((m, watch.calls[m]) for m in known.modules if watch.calls[m] != 1),
        "order": tuple(watch.order),
        # modules that do what a layout may not allow
        "value_readers": among(watch.looks),
        "data_decides_calls": watch.steers,
        "recomputed": watch.recomputed(),
        "checkpointed": tuple(watch.checkpointed.items()),
        "nested": among(watch.nested),
        "inferred": among(watch.inferred),
        "fills": among(watch.fills),
        "lazy": among(watch.lazy),
        "strided": among(watch.strided),
        "gapped": among(watch.gapped),
        "requires_grad_changes": tuple(watch.toggles),
        "other_parameters": among(watch.swapped),
        "overwrites": among(watch.overwrites),
        "sparse": among(watch.sparse),
        "memory_writers": among(watch.bypasses),
        "aliased": among(watch.results.changed),
        "named": among(watch.results.named),
        "opaque": tuple((m, watch.results.opaque[m]) for m in among(watch.results.opaque)),
        "detached": _detached(output),
        # effects of the forward
        "effects": _effects(watch, output, meter),
    }


def _detached(output: Any) -> bool:
    """Returns true if ``output`` has floating-point numbers, and none has a gradient."""
    floating = [t for t in tensors(output) if t.is_floating_point() or t.is_complex()]
    return bool(floating) and not any(t.requires_grad for t in floating)


def _effects(watch: ForwardObserver, output: Any, meter: ForwardMeter) -> Effects:
    return Effects(
        changes=watch.effects.changes(output, meter.kept),
        inner_gradients=tuple(dict.fromkeys(watch.taken)),
        sparse_tables=tuple(watch.effects.sparse),
        mixed_dtypes=meter.disagree,
        reads=tuple(watch.effects.reads),
        foreign=tuple(watch.effects.foreign),
        grad_reads=tuple(watch.grads),
        versions=tuple(watch.versions),
        state_dicts=tuple(watch.state_dicts),
        borrowed=tuple(watch.borrowed),
        inside_modes=tuple(watch.under.items()),
        hooks=tuple(watch.hooks),
        mixed=tuple(watch.effects.mixed),
        normalizing=tuple(watch.effects.mixed),
        draws=tuple(watch.effects.draws),
        dropouts=tuple(n for n in watch.effects.draws if n in watch.effects.dropouts),
        saves_unfilled=tuple(watch.effects.saves_unfilled),
        world=tuple(watch.world),
        global_draws=watch.global_draws,
        seeds=watch.seeds,
        ids_beyond_tables=tuple((name, rows, most) for name, (rows, most) in watch.values.beyond.items()),
        lookups=tuple(watch.values.lookups),
        eval_changes_state=watch.moved,
    )


def _segments(watch: ForwardObserver, saved: int, outside: Operations) -> tuple[Segment, ...]:
    """Returns the calls of units in order, and the bytes kept outside of them.

    ``outside`` starts with the operations of the full model.
    """
    backwards = BackwardMeter()
    segments = []
    for run in watch.runs:
        seen = backwards.measure(run.module, run.args, run.kwargs) or Measured(Backward(), Operations())
        outside -= seen.forward
        segments.append(Segment(run.name, run.saved, seen.backward, _nbytes(run.made)))
    rest = Segment("", saved - sum(s.saved for s in segments), Backward(operations=outside.backward))
    return (*segments, rest)


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(spec(t).nbytes for t in tensors)


def single_node_graph(model: nn.Module, inputs: Sequence[TensorSpec], ours: bool = False) -> Graph:
    """Returns the model as a single node, for one stage; any Python is allowed. ``ours``: as in ``graph``."""
    known = skeleton(model)
    made, moved = _single_node(model, known, inputs)
    if ours and not modal(model):
        return _evaluated(made, made.effects)
    if moved or made.value_readers:
        made = _remembering(made, model, inputs)
    evaluated = copied(model)  # the model's own eval() may count calls or merge weights
    other = Effects()
    with suppress(RequestError, NotImplementedError, RuntimeError):  # a run that evaluates will report it
        evaluated.eval()
        other = _single_node(evaluated, known, inputs)[0].effects
    made = _with_backward_reads(_evaluated(made, other), model, inputs)
    return _drifting(made, model, inputs)


def _remembering(graph: Graph, model: nn.Module, inputs: Sequence[TensorSpec]) -> Graph:
    """Returns ``graph`` with the Python state that its forwards keep."""
    kept, resets = moving(model, meta(inputs), bool(graph.value_readers)), not_restored(model, meta(inputs))
    return replace(graph, effects=replace(graph.effects, carried=kept, resets=resets))


def _with_backward_reads(graph: Graph, model: nn.Module, inputs: Sequence[TensorSpec]) -> Graph:
    """Returns ``graph`` with what the backward reads and changes.

    It reads gradients, and weights and state of other modules; it changes Python state.
    """
    read = backward_reads(model, meta(inputs))
    names = {k.name for k in graph.effects.carried}
    moved = (k for k in moved_by_backwards(model, meta(inputs)) if k.name not in names)
    effects = replace(
        graph.effects,
        early_grad_reads=read.gradients,
        late_reads=read.others,
        carried=(*graph.effects.carried, *moved),
    )
    return replace(graph, effects=effects)


def _drifting(graph: Graph, model: nn.Module, inputs: Sequence[TensorSpec]) -> Graph:
    """Returns ``graph`` with the Python state that changes and that outputs in evaluation mode depend on."""
    if not graph.effects.eval_changes_state:
        return graph
    evaluated = copied(model)  # the model's own eval() may count calls
    try:
        evaluated.eval()
    except (NotImplementedError, RuntimeError):  # it reads values, which a plan does not have
        return graph
    return replace(graph, effects=replace(graph.effects, eval_state_reads=drifting(evaluated, meta(inputs))))


def _single_node(model: nn.Module, known: ModelStructure, inputs: Sequence[TensorSpec]) -> tuple[Graph, bool]:
    """Runs the model in its present mode; also returns whether Python state changed.

    A model that reads values is traced with its units as leaves, because the code that reads them may lie
    inside of units. If that fails, the full model runs on values in memory.
    """
    try:
        return _single(model, known, inputs, lambda model, xs, seen: model(*xs))
    except RequestError as error:
        if not needs_values(error.__cause__):
            raise
    try:
        traced = follow(model, frozenset(units(known)), meta(inputs), _loaded(known, model))
    except RequestError:
        return _single(model, known, inputs, lambda model, xs, seen: run_module(model, xs, {}, seen))
    made = _node(known, inputs, _returned(traced), meter=traced.meter, watch=traced.watch)
    return made, traced.watch.moved


def _single(
    model: nn.Module, known: ModelStructure, inputs: Sequence[TensorSpec], run: Callable[..., Any]
) -> tuple[Graph, bool]:
    model = copied(model)  # a forward may count or cache

    def forward() -> tuple[Any, ForwardMeter, ForwardObserver]:
        xs = meta(inputs)
        meter = ForwardMeter((*model.parameters(), *model.buffers()))
        with (
            refusing(model, xs),
            default_dtype(RUNNING),
            torch.device("meta"),
            meter,
            watching(model, _loaded(known, model), lambda: meter.saved, xs) as watch,
        ):
            return run(model, xs, Observers(meter, watch)), meter, watch

    value, meter, watch = forward()
    if watch.effects.changed and not watch.looks:  # otherwise a forward is slow
        with suppress(RequestError):  # then all that the first forward changes may change again
            watch.effects.compare(forward()[2].effects)
    return _node(known, inputs, value, meter=meter, watch=watch), watch.moved


def _node(
    known: ModelStructure,
    inputs: Sequence[TensorSpec],
    value: Any,
    *,
    meter: ForwardMeter,
    watch: ForwardObserver,
) -> Graph:
    made, packed, keys = output_specs(value)
    names = tuple(f"input_{i}" for i in range(len(inputs)))
    ins = tuple(Node(n, "input", n, (), out=(s,)) for n, s in zip(names, inputs, strict=True))

    watched = _watched(watch, known, value, meter)
    done = meter.operations.since(0)
    segments = _segments(watch, meter.saved, done)

    # the model is one node between its inputs and its output
    body = Node(
        "model",
        "module",
        "",
        names,
        out=made,
        packed=packed,
        saved=meter.saved,
        flops=meter.flops,
        backward=Backward(
            again=sum(s.backward.again for s in segments),
            operations=total(s.backward.operations for s in segments),
        ),
        operations=done,
    )
    out = Node("output", "output", "output", ("model",), out=made, packed=packed, keys=keys)
    return Graph((*ins, body, out), **watched, segments=segments)
