"""The glue between named modules as an fx graph: the forward runs once on meta tensors, and what it calls is noted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from launcher.errors import Problem, RequestError
from launcher.parallel.ambient import ambient
from launcher.parallel.capture import Capture, Uncuttable, capturing, scripted
from launcher.parallel.copied import copied
from launcher.parallel.cost import Meter
from launcher.parallel.mode import default_dtype, evaluating
from launcher.parallel.place import of_error
from launcher.parallel.structure import mapped, tensors
from launcher.parallel.watch import Watch, watching
from launcher.plan.effects import DTYPES

RUNNING = torch.float32
"""The default dtype while a forward runs, whatever the weights' is: that of torch."""

STAGES = "parallel.pipeline.stage_config"
CURE = "name a larger module there, so that this code runs inside it"


class Tracer(Capture):
    """The graph of a model, ``leaves`` excepted, which are called and stay what they are.

    The graph is right for inputs of these shapes; another batch shape is traced anew and compared (``same``).
    ``costs``: bytes saved and flops of each node; ``writes``: the storages it has changed;
    ``spans``: where autograd's count stood when it began; ``origins``: where gradients of its value arrive.
    ``evaluation``: the same in evaluation mode, where it was followed too.
    """

    watch: Watch
    evaluation: Tracer | None = None

    def __init__(self, root: nn.Module, leaves: frozenset[str], meter: Meter) -> None:
        super().__init__(root, {id(m): n for n, m in reversed([*root.named_modules()]) if n in leaves})
        self.meter = meter
        self.costs: dict[fx.Node, tuple[int, int]] = {}
        self.writes: dict[fx.Node, frozenset[int]] = {}
        self.spans: list[tuple[int, fx.Node]] = []
        self.origins: dict[fx.Node, frozenset[Any]] = {}
        self._last: tuple[tuple[int, int], frozenset[int], int] = ((0, 0), frozenset(), 0)

    def called(self, node: fx.Node) -> tuple[nn.Module, Any, Any]:
        """The module that ``node`` calls, and what it is given."""
        return self.calls[node]

    def given(self, node: fx.Node) -> tuple[Any, Any]:
        """The values of its arguments."""
        args, kwargs = (fx.node.map_arg(a, self.values.__getitem__) for a in (node.args, node.kwargs))
        return args, kwargs

    def overwritten(self) -> frozenset[fx.Node]:
        """Values that something after them changes in place."""
        out: set[fx.Node] = set()
        later: set[int] = set()
        for node in reversed(self.graph.nodes):
            out |= {node} if later & storages(self.values.get(node)).keys() else set()
            later |= self.writes.get(node, frozenset())
        return frozenset(out)

    def carry_out(self, kind: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        before, began = (self.meter.saved, self.meter.flops), torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.meter.written.clear()
        if kind == "call_module":
            out = call(func, args, kwargs, self.meter, self.watch, really=ambient().casts)
        elif ambient().casts:
            out = _cast(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        wrote = frozenset(self.meter.written)
        self._last = (self.meter.saved - before[0], self.meter.flops - before[1]), wrote, began
        return out, bool(wrote)

    def note(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().note(*args, **kwargs)
        self.costs[node], self.writes[node], began = self._last
        self.spans.append((began, node))
        self.origins[node] = origins(self.values[node])
        return node

    def escaped(self, func: Any) -> None:
        """Refuse an operation that no node accounts for."""
        if not self.eager and torch._C._current_graph_task_id() == -1:
            raise self.refuse(f"{func._schema.name.removeprefix('aten::')} runs there without torch's Python seeing it")


def origins(value: Any) -> frozenset[Any]:
    """What gradients of the tensors in ``value`` arrive at: their functions, or themselves where they are leaves."""
    found = [t for t in tensors(value) if t.requires_grad]
    return frozenset(t.grad_fn if t.grad_fn is not None else id(t) for t in found)


def storages(value: Any) -> dict[int, None]:
    """The memory behind the tensors in ``value``, in their order."""
    return dict.fromkeys(t.untyped_storage()._cdata for t in tensors(value))


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Autocast does nothing on meta tensors, so this one call runs on zeros in memory."""
    given = tensors((args, kwargs))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
        out = func(*args, **kwargs)
    return _returned(out, given, made)


def _returned(out: Any, given: list[torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    """``out`` of stand-ins, on meta again; what is one of the ``given`` is that, and gradients reach all of them."""
    back = {id(made[id(t)]): t for t in given}
    fresh = {id(t): t for t in tensors(out) if id(t) not in back}
    specs = [(t.shape, t.dtype, t.requires_grad) for t in fresh.values()]
    with torch.device("meta"):
        metas = _Opaque.apply(specs, torch.empty((), requires_grad=True), *given)  # type: ignore[no-untyped-call]
    back |= dict(zip(fresh, metas, strict=True))
    return mapped(out, lambda t: back[id(t)])


class _Opaque(torch.autograd.Function):
    """Meta tensors for what something has returned that ran elsewhere."""

    @staticmethod
    def forward(ctx: Any, specs: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(out, specs, strict=True) if not grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a plan has no backward")


def _zeros(t: torch.Tensor) -> torch.Tensor:
    """In memory, and no leaf of autograd where ``t`` has a gradient: it may be changed in place."""
    out = torch.zeros_like(t, device="cpu")
    return out.requires_grad_().clone() if t.requires_grad else out


def call(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    meter: Meter | None = None,
    watch: Watch | None = None,
    really: bool = False,
) -> Any:
    """Run a module on meta tensors; one whose Python looks at the data runs on zeros in memory, alone, instead.

    Then ``meter`` and ``watch`` forget what they saw of the first try. ``really``: on zeros without trying.
    """
    if not really:
        undo = [seen.mark() for seen in (meter, watch) if seen is not None]
        try:
            return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as refused:
            if not looks(refused):
                raise
        for back in undo:
            back()
    with torch._C.DisableTorchFunction():  # to copy a weight is not to use it
        real = zeros(copied(module))
    if watch is not None:
        watch.copied(module, real)
    own = dict(zip(_storages(real), _storages(module), strict=True))
    if meter is not None:
        meter.own((*real.parameters(), *real.buffers()))
    given = tensors((args, kwargs))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        own |= {made[id(t)].untyped_storage()._cdata: t.untyped_storage()._cdata for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        since = len(watch.order) if watch is not None else 0
        with watch.looking() if watch is not None else nullcontext():
            out = real(*args, **kwargs)
        if watch is not None and watch.units_below():
            watch.steers |= _steers(real, args, kwargs, meter, watch, since)
    if meter is not None:
        meter.written.update([own[w] for w in meter.written if w in own])
    return _returned(out, given, made)


def _storages(module: nn.Module) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())]


TRIES = 3


def _steers(real: nn.Module, args: Any, kwargs: Any, meter: Meter | None, watch: Watch, since: int) -> bool:
    """Whether other numbers make other units run, or in another order; tried with a few, nothing of which is kept."""
    g, was = torch.Generator().manual_seed(0), watch.ran(since)
    undo = [seen.mark() for seen in (meter, watch) if seen is not None]

    def noise(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=g).to(t.dtype) if t.is_floating_point() else t

    found = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for _ in range(TRIES):
            for p in real.parameters():
                p.copy_(noise(p))
            now = len(watch.order)
            try:
                real(*mapped(args, noise), **mapped(kwargs, noise))
            except Exception:  # it does not take any numbers: then who knows
                found = True
            found |= watch.ran(now) != was
    for back in undo:
        back()
    return found


def looks(error: BaseException | None) -> bool:
    """Whether it says that Python looked at the data of a tensor that has none."""
    return isinstance(error, RuntimeError | NotImplementedError) and "meta" in str(error).lower()


def zeros(module: nn.Module) -> nn.Module:
    """``module`` itself, its tensors now zeros in memory; what was one tensor under several names still is."""
    made: dict[int, Any] = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.zeros_like(p, device="cpu"), p.requires_grad)
                owner._parameters[name] = made[id(p)]
        for name, b in owner._buffers.items():
            if b is not None:
                owner._buffers[name] = made.setdefault(id(b), torch.zeros_like(b, device="cpu"))
    return module


def trace(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """Trace ``model`` (on meta) for meta ``inputs``; every forward must do the same. Raises ``RequestError``."""
    model = copied(model)  # a forward may count or cache
    drawn, before = _drawn(), _attributes(model, leaves)
    tracer = _follow(model, leaves, inputs, units)
    if changed := [name for name, was in before.items() if not _equal(was, _attributes(model, leaves).get(name))]:
        text = f"the forward changes {changed[0]}, which is on no stage: no other stage and no later step would see it"
        raise RequestError((Problem("model", f"{text}; keep it in a module that has a stage"),))
    if _drawn() != drawn:
        text = "the forward draws numbers from Python's or numpy's random stream, which is another on every rank"
        raise RequestError((Problem("model", f"{text}; draw with torch, inside a module"),))
    if text := same(tracer.graph, _follow(model, leaves, inputs).graph):
        text = f"the code between the named modules differs from one forward to the next ({text})"
        text += ", as a function of torch.jit.script does" if scripted(tracer.graph) else ""
        raise RequestError((Problem("model", f"{text}; move it into a module"),))
    with evaluating([model]):
        tracer.evaluation = other = _follow(model, leaves, inputs)
    tracer.watch.looks |= other.watch.looks
    tracer.watch.steers |= other.watch.steers
    if text := same(tracer.graph, other.graph):
        text = f"the code between the named modules differs between training and evaluation ({text})"
        raise RequestError((Problem("model", f"{text}; move it into a module"),))
    return tracer


def _drawn() -> tuple[Any, ...]:
    """The state of the random streams that are not torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *rest


OURS = frozenset(vars(nn.Module()))


def _attributes(model: nn.Module, leaves: frozenset[str]) -> dict[str, Any]:
    """What the modules around the leaves keep in Python, and their buffers, by path; containers are copied."""
    out: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not any(path == leaf or path.startswith(leaf + ".") for leaf in leaves):
            mine = {k: v for k, v in vars(module).items() if k not in OURS} | module._buffers
            out |= {f"{path}.{k}".lstrip("."): _shallow(v) for k, v in mine.items()}
    return out


def _shallow(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


def _equal(a: Any, b: Any) -> bool:
    """As far as a forward can tell: the same object, or the same plain value."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(a == b) if isinstance(a, bool | int | float | complex | str | bytes | set | frozenset) else False


def follow(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """The trace in the mode that ``model`` is in. Raises ``RequestError`` where the glue cannot be followed."""
    return _follow(copied(model), leaves, inputs, units)


def _follow(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """The same, of a model that may count or cache while it runs."""
    meter = Meter((*model.parameters(), *model.buffers()))
    tracer = Tracer(model, leaves, meter)
    xs = [torch.empty_like(x) for x in inputs]  # one object each, for two inputs may be one tensor
    _unhooked(model, leaves)
    with (
        refusing(model, inputs, tracer),
        default_dtype(RUNNING),
        torch.device("meta"),
        meter,
        watching(model, units, lambda: meter.saved, xs) as tracer.watch,
        capturing(tracer),
    ):
        meter.tell(tracer.escaped)
        for name, x in zip(_names(model, len(inputs)), xs, strict=True):
            tracer.placeholder(name, x)
        tracer.output(model(*xs))
    return tracer


def _names(model: nn.Module, count: int) -> list[str]:
    """What the forward calls its inputs."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    named = [p.name for p in signature(model.forward).parameters.values() if p.kind in kinds][:count]
    return [*named, *(f"input_{i}" for i in range(len(named), count))]


def _unhooked(model: nn.Module, leaves: frozenset[str]) -> None:
    """A backward hook of a module that is cut has no backward of its own to hook."""
    for path, module in model.named_modules():
        inside = any(path == leaf or path.startswith(leaf + ".") for leaf in leaves)
        if not inside and (module._backward_hooks or module._backward_pre_hooks):
            text = f"{path or type(model).__name__} has a backward hook, and its forward is cut between the stages"
            raise RequestError((Problem("model", f"{text}; put the hook on a module that has a stage of its own"),))


@contextmanager
def refusing(model: nn.Module, inputs: Sequence[torch.Tensor], tracer: Tracer | None = None) -> Iterator[None]:
    """Whatever the user's forward raises becomes a ``RequestError``; what cannot be followed comes with a cure."""
    name = type(model).__name__
    try:
        yield
        if tracer is not None and tracer.refused is not None:
            raise tracer.refused
    except RequestError:
        raise
    except Exception as error:
        first = error if tracer is None or tracer.refused is None else tracer.refused
        line = next(iter(str(first).strip().splitlines()), "")
        at = f" ({where})" if (where := of_error(first)) else ""
        if isinstance(first, Uncuttable):
            text = f"cannot follow the code between the named modules of {name}{at}: {line}; {CURE}"
            raise RequestError((Problem(STAGES, text),)) from first
        if tracer is not None and looks(first):
            text = f"cannot follow the code between the named modules of {name}{at}: its Python looks at data; {CURE}"
            raise RequestError((Problem(STAGES, text),)) from first
        if "meta" in line.lower():
            text = f"cannot follow the code between the named modules of {name}{at}: {line}; {CURE}"
            raise RequestError((Problem(STAGES, text),)) from first
        shapes = ", ".join(f"{tuple(x.shape)}" for x in inputs)
        text = f"the forward of {name} fails for inputs of shape {shapes}: {type(first).__name__}: {line}"
        if "dtype" in line or "scalar type" in line:
            text = f"{text}{at}; {DTYPES}"
        raise RequestError((Problem("model", text),)) from first


def same(a: fx.Graph, b: fx.Graph) -> str:
    """Where two graphs first differ, in words; "" when they do the same."""
    for left, right in zip(a.nodes, b.nodes, strict=False):
        if (one := said(left)) != (other := said(right)):
            return f"{one} / {other}"
    return "" if len(a.nodes) == len(b.nodes) else f"{len(a.nodes)} / {len(b.nodes)} operations"


def said(node: fx.Node) -> str:
    """A call with all its constants: ``y = mul(x, 2)``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    given = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    return f"{node.name} = {name}({', '.join(given)})"
