"""The glue between named modules as an fx graph: the forward runs once on meta tensors, and what it calls is noted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from launcher.errors import Problem, RequestError, of_users
from launcher.parallel.ambient import ambient
from launcher.parallel.capture import Capture, Uncuttable, capturing, scripted
from launcher.parallel.copied import copied
from launcher.parallel.cost import Meter
from launcher.parallel.mode import default_dtype, evaluating
from launcher.parallel.on_zeros import call, cast, looks
from launcher.parallel.place import of_error
from launcher.parallel.structure import tensors
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
            out = cast(func, args, kwargs)
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
        inner = f" in {path}" if (path := _submodule(model, first)) else ""
        text = f"the forward of {name} fails{inner} for inputs of shape {shapes}: {of_users(first)}"
        if "dtype" in line or "scalar type" in line:
            text = f"{text}; {DTYPES}"
        raise RequestError((Problem("model", text),)) from first


def _submodule(model: nn.Module, error: BaseException) -> str:
    """The innermost module of ``model`` whose forward ``error`` went through; "" for the model's own."""
    names = {id(m): f"{path} ({type(m).__name__})" for path, m in model.named_modules() if path}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return found


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
