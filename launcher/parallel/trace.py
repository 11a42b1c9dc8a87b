"""The glue between named modules as an fx graph, traced with real shapes and real values for all that is no tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.errors import Problem, RequestError
from launcher.parallel.cost import Meter
from launcher.parallel.mode import default_dtype, evaluating
from launcher.parallel.watch import Watch, watching

MAKERS = frozenset({
    torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones,
    torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.tril_indices, torch.triu_indices,
    torch.zeros,
})  # fmt: skip
"""What makes a tensor out of none."""

RUNNING = torch.float32
"""The default dtype while a forward runs, whatever the weights' is: that of torch."""


class _Value(fx.Proxy):
    """A proxy that knows what it stands for: a meta tensor, or the very number or shape."""

    @property
    def meant(self) -> Any:
        assert isinstance(self.tracer, Tracer)
        return self.tracer.values[self.node]

    def __len__(self) -> int:
        return len(self.meant)

    def __index__(self) -> int:
        return int(self.meant.__index__())

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if isinstance(self.meant, torch.Tensor) else format(self.meant, spec)


class Tracer(fx.Tracer):
    """Traces through a model, ``leaves`` excepted, which are called and stay what they are.

    Every value is worked out on meta tensors on the way, so glue may branch on shapes. The graph is right for inputs
    of these shapes; another batch shape is traced anew and compared (``same``).
    """

    proxy_buffer_attributes = True

    watch: Watch

    def __init__(self, leaves: frozenset[str], inputs: Sequence[torch.Tensor], meter: Meter) -> None:
        super().__init__()
        self.leaves, self.inputs, self.meter = leaves, list(inputs), meter
        self.values: dict[fx.Node, Any] = {}
        self.costs: dict[fx.Node, tuple[int, int]] = {}
        self.versions: dict[fx.Node, tuple[int, ...]] = {}
        self.eager = False

    def overwritten(self) -> frozenset[fx.Node]:
        """Values that something after them changes in place."""
        return frozenset(n for n, v in self.versions.items() if v != _versions(self.values[n]))

    def called(self, node: fx.Node) -> tuple[nn.Module, Any, Any]:
        """The module that ``node`` calls, and what it is given."""
        return self.root.get_submodule(str(node.target)), *self.given(node)

    def given(self, node: fx.Node) -> tuple[Any, Any]:
        """The values of its arguments."""
        args, kwargs = (fx.node.map_arg(a, self.values.__getitem__) for a in (node.args, node.kwargs))
        return args, kwargs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.eager else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.eager else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = super().create_node(*args, **kwargs)
        before = self.meter.saved, self.meter.flops
        self.eager = True
        try:
            self.values[node] = self._run(node)
        finally:
            self.eager = False
        self.costs[node] = self.meter.saved - before[0], self.meter.flops - before[1]
        self.versions[node] = _versions(self.values[node])
        return node

    def create_arg(self, a: Any) -> Any:
        arg = super().create_arg(a)
        if isinstance(arg, fx.Node) and isinstance(a, torch.Tensor) and str(arg.target).startswith("_tensor_constant"):
            raise NotOfTheModel
        return arg

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs.pop(0) if self.inputs else node.args[0] if node.args else None
        args = fx.node.map_arg(node.args, self.values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self.values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            return _attribute(self.root, str(node.target))
        if node.op == "call_module":
            return call(self.root.get_submodule(str(node.target)), args, kwargs, self.meter, self.watch)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.values[obj.node]
        return super().to_bool(obj) if isinstance(value, torch.Tensor) else bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.values[obj.node]
        if isinstance(value, tuple | list | torch.Size) or (isinstance(value, torch.Tensor) and value.dim()):
            return iter([obj[i] for i in range(len(value))])  # type: ignore[index]
        return super().iter(obj)


class NotOfTheModel(Exception):
    """The glue uses a tensor that the model does not own."""

    def __str__(self) -> str:
        return "it uses a tensor that is no parameter or buffer of the model; make it one with register_buffer"


class _Made(TorchFunctionMode):
    """Glue that makes a tensor becomes a node: traced as it is, the tensor would be a meta tensor without numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.eager or func not in MAKERS:
            return func(*args, **(kwargs or {}))
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(t._version for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _attribute(root: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def call(module: nn.Module, args: Any, kwargs: Any, meter: Meter | None = None, watch: Watch | None = None) -> Any:
    """Run a module on meta tensors; one whose Python looks at the data runs on zeros in memory, alone, instead.

    Then ``meter`` and ``watch`` forget what they saw of the first try.
    """
    undo = [seen.mark() for seen in (meter, watch) if seen is not None]
    try:
        return module(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as refused:
        if not looks(refused):
            raise
    for back in undo:
        back()
    with torch._C.DisableTorchFunction():  # to copy a weight is not to use it
        real = zeros(copy.deepcopy(module))
    if meter is not None:
        meter.own((*real.parameters(), *real.buffers()))
    with torch.device("cpu"):
        args, kwargs = tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device="cpu"), (args, kwargs))
        out = real(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda t: t.to("meta"), out)


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
    """Trace ``model`` (on meta) for meta ``inputs``; training and evaluation must agree. Raises ``RequestError``."""
    tracer = follow(model, leaves, inputs, units)
    with evaluating([model]):
        other = follow(model, leaves, inputs)
    if text := same(tracer.graph, other.graph):
        text = f"the code between the named modules differs between training and evaluation ({text})"
        raise RequestError((Problem("model", f"{text}; move it into a module"),))
    return tracer


def follow(
    model: nn.Module, leaves: frozenset[str], inputs: Sequence[torch.Tensor], units: Sequence[str] = ()
) -> Tracer:
    """The trace in the mode that ``model`` is in. Raises ``RequestError`` where the glue cannot be followed."""
    model = copy.deepcopy(model)  # a forward may count or cache
    meter = Meter((*model.parameters(), *model.buffers()))
    tracer = Tracer(leaves, inputs, meter)
    names = list(signature(model.forward).parameters.values())[len(inputs) :]
    rest = {p.name: p.default for p in names if p.default is not p.empty}
    with (
        refusing(model, inputs),
        default_dtype(RUNNING),
        torch.device("meta"),
        meter,
        _Made(tracer),
        watching(model, units, lambda: meter.saved) as tracer.watch,
    ):
        tracer.graph = _without_defaults(tracer.trace(model, rest), len(inputs))
    return tracer


@contextmanager
def refusing(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Whatever the user's forward raises becomes a ``RequestError``; what cannot be followed comes with a cure."""
    name, key = type(model).__name__, "parallel.pipeline.stage_config"
    try:
        yield
    except NotOfTheModel as error:
        raise RequestError((Problem("model", f"the forward of {name} cannot be cut: {error}"),)) from error
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        if isinstance(error, fx.proxy.TraceError) or "meta" in line.lower():
            text = f"cannot follow the code between the named modules of {name}: {line}"
            cure = "name a larger module there, so that this code runs inside it"
            raise RequestError((Problem(key, f"{text}; {cure}"),)) from error
        shapes = ", ".join(f"{tuple(x.shape)}" for x in inputs)
        text = f"the forward of {name} fails for inputs of shape {shapes}: {type(error).__name__}: {line}"
        raise RequestError((Problem("model", text),)) from error


def _without_defaults(graph: fx.Graph, inputs: int) -> fx.Graph:
    """Drop the arguments that keep their default, and the checks fx adds that they do."""
    for node in [n for n in graph.nodes if n.op == "placeholder"][inputs:]:
        for user in list(node.users):
            if getattr(user.target, "__name__", "") == "_assert_is_none":
                graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)
    return graph


def same(a: fx.Graph, b: fx.Graph) -> str:
    """Where two graphs first differ, in words; "" when they do the same."""
    for left, right in zip(a.nodes, b.nodes, strict=False):
        if left.format_node() != right.format_node():
            return f"{left.format_node()} / {right.format_node()}"
    return "" if len(a.nodes) == len(b.nodes) else f"{len(a.nodes)} / {len(b.nodes)} operations"
