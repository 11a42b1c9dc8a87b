"""Traces the code between named modules into an fx graph, and checks that every forward does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.cost.kernels import ForwardMeter
from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.dispatch.training_mode import evaluating
from launcher.parallel.dispatch.user_lines import of_error
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import contents_put_back, files_of, put_back, variables
from launcher.parallel.model_state.numbers_outside_weights import Key, aged, values
from launcher.parallel.model_state.python_state import changed, counters, reading, snapshot
from launcher.parallel.model_state.state_across_passes import moved
from launcher.parallel.trace.attribute_side_effects import SideChannels
from launcher.parallel.trace.forward_observer import ForwardObserver, watching
from launcher.parallel.trace.graph_recorder import Capture, GlueCall, Uncuttable, ambient, recording_calls
from launcher.parallel.trace.random_streams_of_leaves import (
    LeafStreams,
    draws_of_python,
    global_streams_kept,
    seeds_of_torch,
)
from launcher.parallel.trace.run_module import InMemory, Observers, cast, run_module
from launcher.parallel.trace.state_between_forwards import unentangled
from launcher.parallel.trace.tensor_specs import spec
from launcher.plan.cut.stages import around, covers
from launcher.plan.refusals.model import DTYPES
from launcher.plan.values.operations import Operations
from launcher.user_errors import user_error

RUNNING = torch.float32
"""The default dtype while a forward runs: torch's own, whatever the dtype of the weights."""

MODAL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Modules of torch that models of this package may have, and that depend on the training mode."""

STAGES = "parallel.pipeline.stage_config"
CURE = "name a larger module in stage_config, so that this code runs inside it"
LOOKS = "its Python looks at data"
NUMPY = "it passes a tensor to numpy, to read or change its values"
VALUES = "a plan has shapes and no values, so compute this with operations of torch on tensors"


Cost = tuple[int, int, Operations]
NO_COST: Cost = (0, 0, Operations())


class Tracer(Capture):
    """The graph of a model with ``leaves`` as opaque calls.

    The graph is valid for inputs of these shapes; for another batch shape it is traced again and compared.

    Attributes:
        watch: the observations of the forward.
        side_channels: checks that leaves receive values only as arguments.
        streams: the global random streams around each leaf.
        evaluation: the trace in evaluation mode, if there is one.
        costs: bytes saved, flops and kernels of each node.
        writes: the storages that each node has changed.
        spans: autograd's sequence number when each node began.
        aged: traces of copies of the model after many forwards, if it counts them.
        origins: the autograd functions at which gradients of each node's value arrive.
    """

    watch: ForwardObserver
    side_channels: SideChannels | None = None
    streams: LeafStreams | None = None
    evaluation: Tracer | None = None

    def __init__(self, root: nn.Module, leaves: frozenset[str], meter: ForwardMeter) -> None:
        super().__init__(root, {id(m): n for n, m in reversed([*root.named_modules()]) if n in leaves})
        self.meter = meter
        self.costs: dict[fx.Node, Cost] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.spans: list[tuple[int, fx.Node]] = []
        self.origins: dict[fx.Node, frozenset[Any]] = {}
        self._last: tuple[Cost, frozenset[int], int] = (NO_COST, frozenset(), 0)
        self.aged: list[Tracer] = []
        self._leaves_around: dict[str, list[str]] = {}

    def called(self, node: fx.Node) -> tuple[nn.Module, Any, Any]:
        """Returns the module that ``node`` calls, and its arguments."""
        return self.calls[node]

    def arguments_of(self, node: fx.Node) -> tuple[Any, Any]:
        """Returns the values of the node's arguments."""
        args, kwargs = (fx.node.map_arg(a, self.values.__getitem__) for a in (node.args, node.kwargs))
        return args, kwargs

    def overwritten(self) -> frozenset[fx.Node]:
        """Returns the values that a later node changes in place."""
        out: set[fx.Node] = set()
        later: set[int] = set()
        for node in reversed(self.graph.nodes):
            out |= {node} if later & storages(self.values.get(node)).keys() else set()
            later |= self.writes.get(node, frozenset())
        return frozenset(out)

    def carry_out(self, call: GlueCall) -> tuple[Any, bool]:
        saved = self.meter.saved
        flops = self.meter.flops
        kernels = self.meter.operations.mark()
        began = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.meter.written.clear()

        if call.kind == "call_module":
            out = self._call_leaf(call)
        elif ambient().casts:
            out = cast(call.func, call.args, call.kwargs, self.watch)
        else:
            out = call.func(*call.args, **call.kwargs)

        # kept for the node, if the call gets one
        wrote = frozenset(self.meter.written)
        done = self.meter.operations.since(kernels)
        self._last = (self.meter.saved - saved, self.meter.flops - flops, done), wrote, began
        return out, bool(wrote)

    def _call_leaf(self, call: GlueCall) -> Any:
        """Runs a leaf, and checks that it receives values only as arguments."""
        leaf = self.leaves[id(call.func)]
        report = None
        if self.side_channels is not None:
            self._unchanged(self.side_channels.begin(leaf), leaf)
            report = partial(self._depends, leaf)

        module: Any = call.func
        seen = Observers(self.meter, self.watch, report)
        if self.streams is not None:
            self.streams.begin()
        out = run_module(module, call.args, call.kwargs, seen, on_zeros=ambient().casts)
        if self.streams is not None:
            self.streams.end(leaf)
        if self.side_channels is not None:
            self.side_channels.end(leaf)
        return out

    def _unchanged(self, at: str, leaf: str) -> None:
        if at:
            raise self.refuse(f"it changes {at}, which {leaf} would not see on its stage")

    def _depends(self, leaf: str, difference: str) -> None:
        """Refuses a result that depends on values: code between the leaves runs now, and never again."""
        raise self.refuse(f"{leaf} returns {difference} for other data; return a tensor of a fixed shape")

    def over(self) -> None:
        """Checks what modules leave at the end of the forward, while their calls are still captured."""
        self.watch.settle()  # a class whose own __call__ is captured has another function in its place
        if self.streams is not None:
            self.streams.over()
        if self.side_channels is not None:
            self._unchanged(*self.side_channels.over())
            place, leaf = self.side_channels.taken()
            if place:
                raise self.refuse(
                    f"{leaf} leaves a value in {place} for another module, which may be on another stage"
                )

    def note(self, call: GlueCall, out: Any) -> fx.Node:
        node = super().note(call, out)
        self.costs[node], self.writes[node], began = self._last
        self.spans.append((began, node))
        self.origins[node] = origins(self.values[node])
        return node

    def escaped(self, func: Any) -> None:
        """Refuses an operation that belongs to no node."""
        if not self.eager and torch._C._current_graph_task_id() == -1:
            name = func._schema.name.removeprefix("aten::")
            raise self.refuse(f"{name} runs there without a call in Python that could be recorded")

    def read(self, name: str) -> None:
        """Refuses an outside read of Python state that a leaf changes: the graph would keep its value."""
        inside = self._containing(name.rpartition(".")[0])
        here = self.watch.running
        ours = self.eager and not any(covers(u, here) for u in self.leaves.values())  # it is being copied
        if not ours and not any(covers(leaf, here) for leaf in inside):
            raise self.refuse(f"it reads {name}, which {inside[0]} changes as it runs")

    def _containing(self, path: str) -> list[str]:
        """Returns the leaves that contain the module at ``path``, the outermost first."""
        if path not in self._leaves_around:
            module = self.root.get_submodule(path)
            leaves = {u: self.root.get_submodule(u) for u in self.leaves.values()}
            around = (u for u, leaf in leaves.items() if module in {*leaf.modules()})
            self._leaves_around[path] = sorted(around, key=len)  # the outermost runs in one piece
        return self._leaves_around[path]


def origins(value: Any) -> frozenset[Any]:
    """Returns ``origin_of`` each tensor in ``value`` with a gradient."""
    return frozenset(origin_of(t) for t in tensors(value) if t.requires_grad)


def origin_of(t: torch.Tensor) -> Any:
    """Returns the autograd function that made ``t``, and the number of its output; for a leaf, its id."""
    return (t.grad_fn, t.output_nr) if t.grad_fn is not None else id(t)


def storages(value: Any) -> dict[int, None]:
    """Returns the storages of the tensors in ``value``, in order."""
    return dict.fromkeys(t.untyped_storage()._cdata for t in tensors(value))


def trace(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """Traces ``model`` (on meta) for meta ``inputs``; every forward must do the same.

    Raises ``RequestError``.
    """
    with global_streams_kept(), _left_as_it_is(model):
        return _trace(model, leaves, inputs, units)


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Undoes what forwards of a copy change in objects that cannot be copied, so that ``model`` has them too.

    Raises ``RequestError`` for what cannot be undone, such as a generator that has advanced.
    """
    before = snapshot(model)
    with contents_put_back(model):
        yield
    after = snapshot(model)
    for key in changed(before, after):
        text = f"{key[0]} cannot be copied, and planning advances it"
        cure = "make it in the forward, or use an iterator of itertools"
        if isinstance(before.marks.get(key), int | float):
            why = "a hook or function refers to the model itself"
            text = f"{key[0]} also changes when a copy of the model runs: {why}"
            cure = "let it reach the module by its arguments, or use one stage"
        raise RequestError((Problem("model", f"{text}; {cure}"),))


def _trace(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str]
) -> Tracer:
    # the first time
    original, model = model, copied(model)  # a forward may count or cache
    before = snapshot(model)
    modules = files_of(model)
    first, second = LeafStreams(), LeafStreams()
    tracer = _follow(model, leaves, inputs, units, check_side_channels=True, streams=first)
    counted = counters(before, snapshot(model), leaves, tracer.watch.counted)
    numbers = [values(model, modules)]

    # again, and in evaluation mode: it must do the same, or no stage can run it
    once = variables(modules)
    follow_again = partial(_follow, model, leaves, inputs, counted=counted)
    again = follow_again(streams=second, check_side_channels=True)
    tracer.watch.effects.compare(again.watch.effects)
    _each_fills_its_own(tracer, again)
    numbers.append(values(model, modules))
    if draws_of_python(first, second):
        text = "the forward draws numbers from Python's or numpy's random stream"
        why = "which differs on every rank"
        raise RequestError((Problem("model", f"{text}, {why}; draw with torch, inside a module"),))
    tracer.watch.global_draws = False  # the streams have changed, because each leaf began with new seeds
    tracer.watch.seeds = seeds_of_torch(first, second)
    _one_generator_each(tracer, leaves)
    difference = graph_difference(tracer.graph, again.graph)
    if difference:
        text = f"the code between the named modules changes from one forward to the next ({difference})"
        raise RequestError((Problem("model", f"{text}; move it into a module"),))
    counts = changed(once, variables(modules))
    if counts:
        text = f"every call of the forward changes {counts[0][0]}, whose value differs in each process"
        raise RequestError((Problem("model", f"{text}; keep it in a module that has a stage"),))
    _steady(tracer, model, leaves, inputs)
    unentangled(original, {str(n.target): call[1:] for n, call in tracer.calls.items()}, tracer.watch.values)
    _later(tracer, model, leaves, inputs, counted, numbers)
    with evaluating([model]):
        evaluation = follow_again(check_side_channels=True)
        if shared_changes(evaluation):
            _each_fills_its_own(evaluation, follow_again(check_side_channels=True))
        _evaluated(tracer, evaluation)
    return tracer


def shared_changes(tracer: Tracer) -> dict[str, tuple[str, Any]]:
    """Returns the attributes that leaves change in modules of several leaves: the leaf and the new value."""
    return {} if tracer.side_channels is None else tracer.side_channels.shared_changes


def _each_fills_its_own(first: Tracer, second: Tracer) -> None:
    """Refuses changes of modules that several leaves contain, unless each copy fills a cache alike.

    A cache changes only in the ``first`` forward, and does not depend on data. Both forwards do the same with
    data: what only the first of all calls does, the first call on each stage would do.
    """
    effects = first.watch.effects
    alike = effects.on_data == second.watch.effects.on_data
    for at, (leaf, value) in shared_changes(first).items():
        if at in shared_changes(second) or effects.by_data(value) or not alike:
            text = f"{leaf} changes {at}, of which each stage has a copy"
            cure = "pass the value as an argument, or name a module in stage_config that contains all of this"
            raise RequestError((Problem(STAGES, f"{text}; {cure}"),))


def _later(
    tracer: Tracer,
    model: nn.Module,
    leaves: frozenset[str],
    inputs: Sequence[torch.Tensor],
    counted: Sequence[str],
    numbers: Sequence[Mapping[Key, Any]],
) -> None:
    """Refuses a model that counts its forwards if, after many of them, it does what no stage can do.

    ``numbers`` has its counts after each of two forwards. A forward that fails so late is not judged.
    """
    names = files_of(model)
    with put_back(names):
        for age, older in aged(model, names, *numbers):
            try:
                again = _follow(older, leaves, inputs, counted=counted, check_side_channels=True)
                _each_fills_its_own(again, again)
                difference = graph_difference(tracer.graph, again.graph)
                text = f"the code between the named modules changes ({difference}); move it into a module"
                key = "model" if difference else ""
                tracer.aged.append(again)
                unentangled(
                    older, {str(n.target): call[1:] for n, call in again.calls.items()}, again.watch.values
                )
            except RequestError as error:
                first = error.problems[0]
                late = isinstance(error.__cause__, Uncuttable) or error.__cause__ is None
                key, text = first.key if late else "", first.text
            if key:
                raise RequestError((Problem(key, f"after {age:,} more forwards, {text}"),))


def trace_ours(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """Traces a model of this package, whose forwards are known to do the same each time."""
    model = copied(model)
    tracer = _follow(model, leaves, inputs, units)
    if modal(model):
        with evaluating([model]):
            _evaluated(tracer, _follow(model, leaves, inputs))
    else:
        tracer.evaluation = tracer
    return tracer


def modal(model: nn.Module) -> bool:
    """Returns true if the model has a module of torch that depends on the training mode."""
    return any(isinstance(m, MODAL) for m in model.modules())


def _evaluated(tracer: Tracer, other: Tracer) -> None:
    """Adds the trace in evaluation mode; the code between the modules must be the same."""
    tracer.evaluation = other
    tracer.watch.looks |= other.watch.looks
    tracer.watch.steers |= other.watch.steers
    difference = graph_difference(tracer.graph, other.graph)
    if difference:
        text = f"the code between the named modules differs between training and evaluation ({difference})"
        raise RequestError((Problem("model", f"{text}; move it into a module"),))


def _one_generator_each(tracer: Tracer, leaves: frozenset[str]) -> None:
    """Refuses a generator of torch from which several leaves draw: its state does not advance on meta."""
    for drawers in tracer.watch.effects.generators.values():
        several = list(dict.fromkeys(next((u for u in leaves if covers(u, n)), n) for n in drawers))
        if len(several) > 1:
            text = f"{' and '.join(several)} draw from one torch.Generator"
            why = "of which each stage would have a copy"
            raise RequestError((Problem("model", f"{text}, {why}; give each of them its own"),))


def _steady(tracer: Tracer, model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor]) -> None:
    """Refuses a forward that reads state that earlier backwards have changed."""
    names = list(dict.fromkeys(n for call in tracer.calls.values() for n in moved(model, *call)))
    read: dict[str, None] = {}
    if names:
        with reading(model, names, lambda name: read.setdefault(name)):
            _follow(model, leaves, inputs)
    if read:
        text = f"the backward changes {next(iter(read))}, which the forward reads"
        why = "in a pipeline other forwards run before that backward than in one process"
        raise RequestError((Problem("model", f"{text}, but {why}; change it in the forward"),))


def follow(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """Traces ``model`` once, in its present mode.

    Raises ``RequestError`` if the glue cannot be traced.
    """
    with _left_as_it_is(model):
        return _follow(copied(model), leaves, inputs, units)


def _follow(
    model: nn.Module,
    leaves: frozenset[str],
    inputs: Sequence[torch.Tensor],
    units: Sequence[str] = (),
    counted: Sequence[str] = (),
    check_side_channels: bool = False,
    streams: LeafStreams | None = None,
) -> Tracer:
    """Traces a model that may count or cache while it runs.

    ``counted`` has attributes that only their own leaf may read. ``streams`` records the random streams.
    """
    meter = ForwardMeter((*model.parameters(), *model.buffers()))

    # the tracer, and its inputs
    tracer = Tracer(model, leaves, meter)
    tracer.streams = streams
    if streams is not None:
        streams.start()
    xs = [torch.empty_like(x) for x in inputs]  # one object each, because two inputs may be one tensor
    _unhooked(model, leaves)

    with (
        refusing(model, inputs, tracer),
        default_dtype(RUNNING),
        torch.device("meta"),
        meter,
        watching(model, units, lambda: meter.saved, xs) as tracer.watch,
        recording_calls(tracer),
        reading(model, counted, tracer.read),
    ):
        # observers
        meter.tell(tracer.escaped)
        if check_side_channels:
            called = {name: model.get_submodule(name) for name in tracer.leaves.values()}
            tracer.side_channels = SideChannels(model, called)

        # the forward, from its inputs to its output
        for name, x in zip(_names(model, len(inputs)), xs, strict=True):
            tracer.placeholder(name, x)
        tracer.output(model(*xs))
        tracer.over()
    return tracer


def _names(model: nn.Module, count: int) -> list[str]:
    """Returns the forward's names of its inputs."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = [p.name for p in signature(model.forward).parameters.values() if p.kind in kinds][:count]
    return [*named, *(f"input_{i}" for i in range(len(named), count))]


def _unhooked(model: nn.Module, leaves: frozenset[str]) -> None:
    """Refuses backward hooks of modules that are split: they have no backward of their own."""
    for path, module in model.named_modules():
        hooked = module._backward_hooks or module._backward_pre_hooks
        if hooked and leaves.isdisjoint(around(path)):
            text = f"{path or type(model).__name__} has a backward hook"
            why = "its forward is cut between the stages"
            cure = "put the hook on a module that has a stage of its own"
            raise RequestError((Problem("model", f"{text}, but {why}; {cure}"),))


@contextmanager
def refusing(
    model: nn.Module, inputs: Sequence[torch.Tensor], tracer: Tracer | None = None
) -> Iterator[None]:
    """Turns errors of a user's forward into ``RequestError``, with a cure if only the trace fails."""
    name = type(model).__name__
    try:
        yield
        if tracer is not None and tracer.refused is not None:
            raise tracer.refused
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        first = error if tracer is None or tracer.refused is None else tracer.refused
        line = next(iter(str(first).strip().splitlines()), "")
        path = failing(model, first)
        inner = f" in {path}" if path else ""

        # the forward can run, but not be traced
        if isinstance(first, Uncuttable) or "meta" in line.lower():
            where = of_error(first)
            at = f" ({where})" if where else ""
            if tracer is None and not isinstance(first, Uncuttable):
                flex, looks = "FlexAttention" in line, NUMPY if "to numpy" in line else LOOKS
                why = f"{FLEX}; {MASKED}" if flex else f"{looks} ({line.rstrip('.')}); {VALUES}"
                text = f"the forward of {name} cannot be planned{inner}{at}: {why}"
                raise RequestError((Problem("model", text),)) from first
            cuttable = not isinstance(first, Uncuttable)
            why = SPARSE if "SparseMeta" in line else FLEX if "FlexAttention" in line else LOOKS
            place = f"{inner}{at}" if cuttable else at
            text = f"cannot trace the code between the named modules of {name}{place}"
            text = f"{text}: {why if cuttable else line}; {MASKED if why == FLEX and cuttable else CURE}"
            raise RequestError((Problem(STAGES, text),)) from first

        # an operator that torch traces itself
        operator = _higher_order(first)
        if operator:
            text = f"the forward of {name} cannot be planned{inner}: it calls torch's {operator}, {TRACES}"
            raise RequestError((Problem("model", text),)) from first

        # the forward itself fails
        shapes = ", ".join(f"{tuple(x.shape)} {spec(x).dtype}" for x in inputs)
        cure = DTYPES if "dtype" in line or "scalar type" in line else ""
        text = f"the forward of {name} fails{inner} for inputs of shape {shapes}: {user_error(first, cure)}"
        raise RequestError((Problem("model", text),)) from first


FLEX = (
    "flex_attention cannot run on tensors without values, which a plan has, and torch has no backward of it "
    "on a CPU"
)
MASKED = "use torch.nn.functional.scaled_dot_product_attention, with a mask"
SPARSE = "it computes with sparse tensors, which torch cannot do without values"


TRACES = "which cannot run on tensors without values, as a plan has; write it in Python, or use torch.where"


def _higher_order(error: BaseException) -> str:
    """Returns the operator of torch that takes functions, such as ``cond``, in which ``error`` was raised."""
    frame = error.__traceback__
    while frame is not None:
        _, folder, file = frame.tb_frame.f_code.co_filename.rpartition("/torch/_higher_order_ops/")
        if folder:
            return file.removesuffix(".py")
        frame = frame.tb_next
    return ""


def failing(model: nn.Module, error: BaseException) -> str:
    """Returns the innermost module of ``model`` in the traceback of ``error``; "" for the model itself."""
    paths = {id(m): path for path, m in model.named_modules()}
    innermost, frame = "", error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, InMemory):  # from here on a copy runs in the place of a module
            at = paths.get(id(owner.module), "")
            paths |= {id(m): f"{at}.{path}".strip(".") for path, m in owner.real.named_modules()}
        elif type(owner) is type(model) and id(owner) not in paths:  # a copy of the model
            paths |= {id(m): path for path, m in owner.named_modules()}
        elif path := paths.get(id(owner), ""):
            innermost = f"{path} ({type(owner).__name__})"
        frame = frame.tb_next
    return innermost


def graph_difference(a: fx.Graph, b: fx.Graph) -> str:
    """Returns the first difference of two graphs, in words; "" if they do the same."""
    for left, right in zip(a.nodes, b.nodes, strict=False):
        one, other = call_text(left), call_text(right)
        if one != other:
            return f"{one} / {other}"
    return "" if len(a.nodes) == len(b.nodes) else f"{len(a.nodes)} / {len(b.nodes)} operations"


def call_text(node: fx.Node) -> str:
    """Returns a call with all its constants, such as ``y = mul(x, 2)``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    arguments = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    return f"{node.name} = {name}({', '.join(arguments)})"
