"""Records the glue between modules as an fx graph."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, Literal

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from launcher.errors import Problem, RequestError
from launcher.parallel.dispatch.containers import (
    ConstantFunction,
    NamedFunction,
    Rebuilt,
    contents,
    filled,
    here,
    inside,
    pick,
    remade,
    tensors,
)
from launcher.parallel.dispatch.modes import Surroundings, tree_leaves, tree_map_only
from launcher.parallel.model_state.python_state import generator_state
from launcher.parallel.trace.tensor_side_effects import STALE, TIE


def on_meta(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments with the meta device in place of the CPU, which tensors report as theirs."""
    if not any(isinstance(d, torch.device | str) for d in tree_leaves((args, kwargs))):
        return args, kwargs
    swap = lambda d: torch.device("meta") if d.type == "cpu" else d  # noqa: E731
    args, kwargs = tree_map_only(torch.device, swap, (args, dict(kwargs)))
    if kwargs.get("device") == "cpu":
        kwargs["device"] = "meta"
    return args, kwargs


def writable_name(target: Any) -> Any:
    """Returns ``target``, under a name that fx can write into code."""
    if isinstance(target, str | NamedFunction) or target is getitem:
        return target
    if target.__name__ in ("__get__", "__set__"):
        verb = getattr if target.__name__ == "__get__" else setattr
        attribute = target.__self__.__name__
        return NamedFunction(lambda t, *rest: verb(t, attribute, *rest), f"{verb.__name__}_{attribute}")
    name = getattr(target, "__name__", "call").replace("<", "").replace(">", "")
    return NamedFunction(target, name.strip("_") if name.startswith("__") else name)


def why_foreign(t: torch.Tensor) -> str:
    """Returns why a tensor that belongs to neither the model nor the trace cannot be used."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "it calls torch.func (vmap, grad), whose tensors exist only inside of that call"
    if isinstance(t, nn.Parameter):
        text = "it uses a parameter of another copy of the model"
        return f"{text}, for example in a function that __init__ made and that refers to self"
    return "it uses a tensor that was not created there and is neither a parameter nor a buffer of the model"


def _registering() -> bool:
    """Returns true if a module registers a parameter, whose properties torch reads then."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "_registering"):
        frame = frame.f_back
    return frame is not None and frame.f_code is nn.Module.register_parameter.__code__


def is_frozen(a: Any) -> bool:
    """Returns true if the object is immutable."""
    made: Any = getattr(type(a), "__dataclass_params__", None)
    return isinstance(a, frozenset | np.dtype | type) or (made is not None and made.frozen)


def captured_state(func: Any) -> str:
    """Describes an object that a function refers to and that would differ between stages, or returns ""."""
    # closures, methods, partials and defaults
    cells = [c.cell_contents for c in getattr(func, "__closure__", None) or () if not _empty(c)]
    bound = [*cells, getattr(func, "__self__", None), *getattr(func, "args", ()), getattr(func, "func", None)]
    bound += (getattr(func, "keywords", None) or {}).values()
    bound += getattr(func, "__defaults__", None) or ()

    for value in bound:
        for some in value if isinstance(value, list | tuple) else (value,):
            if isinstance(some, torch.Tensor):
                return "a tensor"
            if isinstance(some, nn.Module):
                return f"the module {type(some).__name__}"
            description = captured_state(some) if callable(some) and not isinstance(some, type) else ""
            if description:
                return description
    return ""


def _empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _kinds() -> tuple[str, ...]:
    """Returns the kinds of device that a model may use here."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@dataclass(frozen=True)
class Ambient:
    """The modes at one place of the code.

    ``grad``: whether autograd records. ``autocast``: its dtype per kind of device, or ``None``. ``dtype``:
    the default dtype of new tensors. ``read_device``: the code has read the device of a tensor, which is the
    CPU while it is recorded.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    dtype: torch.dtype
    read_device: bool = False

    @property
    def casts(self) -> bool:
        return any(dtype is not None for _, dtype in self.autocast)

    def on(self, device: torch.device) -> Ambient:
        """Returns the modes of code that runs on ``device``, as after ``torch.autocast(x.device.type)``."""
        kinds = dict(self.autocast)
        if not self.read_device or device.type not in kinds or kinds[device.type] is not None:
            return self
        kinds[device.type], kinds["cpu"] = kinds["cpu"], None
        return replace(self, autocast=(*kinds.items(),))

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                if dtype is not None or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            yield


def ambient() -> Ambient:
    """Returns the present modes."""
    on = torch.is_autocast_enabled
    casts = tuple((k, torch.get_autocast_dtype(k) if on(k) else None) for k in _kinds())
    return Ambient(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=casts,
        dtype=torch.get_default_dtype(),
    )


@dataclass(frozen=True)
class UnderModes:
    """``func`` as a function that enters ``modes`` for its call; fx writes it into code by its name."""

    func: Callable[..., Any]
    modes: Ambient

    @property
    def __name__(self) -> str:
        return f"under_{getattr(self.func, '__name__', 'call')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.modes.entered():
            return self.func(*args, **kwargs)


RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "alpha_dropout", "empty", "new_empty")
"""Prefixes of functions whose results differ each time."""


class _NotConstant(Exception):
    """Raised if a value depends on an input, a weight or a random number."""


def constant_value(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    """Returns the value of ``node`` on the CPU, or ``None``."""
    try:
        return _value(node, done)
    except _NotConstant:
        return None


def _value(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    if node not in done:
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name.startswith(RANDOM) or name == "setitem":
            raise _NotConstant
        args, kwargs = (fx.node.map_arg(a, lambda n: _value(n, done)) for a in (node.args, node.kwargs))
        if node.target is here:
            done[node] = torch.device("cpu")
        else:
            done[node] = node.target(*args, **kwargs)  # type: ignore[operator, arg-type]
    return done[node]


PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
"""Values that are written into a graph as they are."""

ACTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"})
"""Methods that change something about a tensor other than its values."""

READS = frozenset({
    torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__int__,
    torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist,
})  # fmt: skip
"""Functions that pass the values of a tensor to Python."""

DEVICE = torch.Tensor.device.__get__
META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
GRAD_FN: Any = torch.Tensor.grad_fn
GRAD_FN = GRAD_FN.__get__


class Uncuttable(Exception):
    """Raised for code between the modules that a separate stage cannot run. The text says what it does.

    "It" in the text is that code.
    """


@dataclass(frozen=True)
class GlueCall:
    """A call between modules: ``func`` runs it, ``kind`` and ``target`` describe it in a graph."""

    kind: Literal["call_function", "call_module"]
    target: Any
    func: Callable[..., Any]
    args: Any
    kwargs: Any


class Capture(TorchFunctionMode):
    """Records torch functions called between modules, and calls of leaves, as the nodes of ``graph``.

    The Python in between runs now and never again: its results are constants of the graph. ``leaves`` are
    modules by id; ``eager`` is true while something runs that is recorded as one node.
    """

    def __init__(self, root: nn.Module, leaves: Mapping[int, str]) -> None:
        super().__init__()
        self.root = root
        self.leaves = leaves

        # the graph, and the value of each node
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.modes: dict[fx.Node, Ambient] = {}
        self.calls: dict[fx.Node, tuple[nn.Module, Any, Any]] = {}

        # the state outside, and whether a node is being made
        self.base = ambient()
        self.eager = False
        self.read_device = False
        self.stream: bytes = b""
        self.hooks: Any = None
        self.around = Surroundings(root)
        self.modes_below = 0
        self.refused: Exception | None = None

        # the origin of each tensor
        self.known: dict[int, tuple[fx.Node, Any]] = {}
        self.alive: list[Any] = []  # the id of a freed object could be reused
        self.attributes: dict[str, fx.Node] = {}

        # the model as it was before
        self.before = {id(v) for m in root.modules() for v in vars(m).values()}
        self.places = {name: id(t) for name, t in _tensors(root)}
        leaf_modules = [m for m in root.modules() if id(m) in leaves]
        self.training = {leaves[id(m)]: [x.training for x in m.modules()] for m in leaf_modules}
        self.built = {leaves[id(m)]: {name: id(t) for name, t in _tensors(m)} for m in leaf_modules}

    def carry_out(self, call: GlueCall) -> tuple[Any, bool]:
        """Runs the call; returns its result, and whether it has changed a tensor in place."""
        raise NotImplementedError

    def overwritten(self) -> frozenset[fx.Node]:
        """Returns the values that a later node changes in place."""
        raise NotImplementedError

    def refuse(self, text: str) -> Uncuttable:
        """Returns the error for ``text``.

        The first reason stays, even if the user's code catches the exception.
        """
        error = Uncuttable(text)
        self.refused = self.refused or error
        return error

    def placeholder(self, name: str, value: torch.Tensor) -> None:
        """Adds an input of the model."""
        node = self.graph.placeholder(name)
        self._learn(node, value)

    def _alike(self) -> None:
        """Refuses seeds, restored random states, hooks and modes: the graph does not record them."""
        if generator_state(torch.default_generator) != self.stream:
            text = "it seeds torch's random stream, or restores its state"
            raise self.refuse(f"{text}; the trace does not record that")
        hooks = saved_tensor_hooks()
        owner = "" if hooks in (None, self.hooks) else hooks[0].__module__.partition(".")[0]
        if owner not in ("", "torch"):
            text = "it has hooks on what autograd saves (saved_tensors_hooks)"
            if owner == "launcher":  # a transform disables hooks, and the plan's own are entered anew
                text = "it computes gradients inside of a transform of torch.func"
            raise self.refuse(f"{text}; the trace does not record that")
        if what := self.around.entered():
            raise self.refuse(f"it is called under {what}, which its stage would not have")

    def output(self, value: Any) -> None:
        self.values[self.graph.output(self.arg(value))] = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.eager:
            return func(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() < self.modes_below:
            # a mode below autograd works on an operation that came through no function
            text = "it runs native code, of torch.jit.script or of an extension"
            raise self.refuse(f"{text}, whose gradient cannot be recorded")

        # properties of a tensor: those that it would have on the CPU
        if func == META:
            return False
        if func == DEVICE:
            self.read_device = True
            return torch.device("cpu")
        if func == GRAD_FN:
            if _registering():
                text = "the forward makes or replaces a parameter"
                raise RequestError((Problem("model", f"{text}, {STALE}; {TIE}"),))
            raise self.refuse("it reads a tensor's grad_fn, which differs on every stage")
        constant = self._always(args[0]) if func in READS else None
        if constant is not None:
            with _disable_current_modes():
                return func(constant, *args[1:], **kwargs)

        return self.call(GlueCall("call_function", func, func, args=args, kwargs=kwargs))

    def call(self, call: GlueCall) -> Any:
        """Runs a call, and records it if it makes or changes tensors."""
        self._alike()
        self.eager = True
        try:
            # its inputs are known, and the module is the one that its stage will have
            known = [self._node(t) for t in tensors((call.args, call.kwargs))]
            changed = filled((call.args, call.kwargs), objects=True)
            if call.kind == "call_module":
                self._as_built(call.target, call.func)

            args, kwargs = on_meta(call.args, call.kwargs)
            out, wrote = self.carry_out(replace(call, args=args, kwargs=kwargs))
            if changed():
                text = f"{call.target} changes a list or dictionary that it receives"
                raise self.refuse(f"{text}, which stages do not share")

            # a node, unless the call only reads a property, such as a shape
            acts = getattr(call.func, "__name__", "") in (*ACTS, "__set__")
            made = bool(known) and not isinstance(out, (*PLAIN, tuple, list))
            if call.kind == "call_module" or tensors(out) or wrote or acts or made:
                self.note(call, out)
        finally:
            self.eager, self.stream = False, generator_state(torch.default_generator)
        return out

    def _always(self, t: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of ``t`` if they depend on no input (such as positions), else ``None``.

        Also ``None`` if memory that ``t`` was computed from has changed since: a view may have changed it.
        """
        self.eager = True
        try:
            if id(t) not in self.known:
                return None
            done: dict[fx.Node, Any] = {}
            with torch.device("cpu"), _disable_current_modes():
                value = constant_value(self._node(t), done)
            lasts = done.keys().isdisjoint(self.overwritten())
            return value if lasts and isinstance(value, torch.Tensor) else None
        finally:
            self.eager = False

    def _as_built(self, path: str, module: Any) -> None:
        """Refuses a call of a leaf in another mode or with other weights than its stage would use."""
        if [m.training for m in module.modules()] != self.training[path]:
            text = f"it switches {path} to train mode or eval mode before it calls {path}"
            raise self.refuse(f"{text}; the trace does not record that")
        now = dict(_tensors(module))
        for name, built in self.built[path].items():
            t = now.get(name)
            if t is None or (id(t) != built and (isinstance(t, nn.Parameter) or id(t) in self.known)):
                raise self.refuse(f"it calls {path} with another tensor in the place of {path}.{name}")

    def note(self, call: GlueCall, out: Any) -> fx.Node:
        """Adds the node of a call that has run."""
        args = tuple(map(self.arg, call.args))
        named = {k: self.arg(v) for k, v in call.kwargs.items()}
        node = self.graph.create_node(call.kind, writable_name(call.target), args, named)
        modes = ambient()
        if modes != self.base:
            self.modes[node] = replace(modes, read_device=self.read_device)
        if call.kind == "call_module":
            self.calls[node] = self.root.get_submodule(call.target), call.args, call.kwargs
        self._learn(node, out)
        return node

    def _learn(self, node: fx.Node, out: Any) -> None:
        self.values[node] = out
        self.alive.append(out)
        for path, t in inside(out):  # a leaf's tuple may contain an input: the newest node counts
            self.known[id(t)] = node, path

    def _node(self, t: torch.Tensor) -> fx.Node:
        """Returns the node that made ``t``."""
        if id(t) not in self.known:
            self.known[id(t)] = self._attribute(t), ()
        node, path = self.known[id(t)]
        if path:
            (kind, key), *rest = path
            simple = kind == "item" and not rest and isinstance(key, int)
            target = getitem if simple else NamedFunction(pick, "pick")
            node = self.graph.call_function(target, (node, key if simple else path))
            self.values[node] = t
            self.known[id(t)] = node, ()
        return node

    def _attribute(self, t: torch.Tensor) -> fx.Node:
        name = next((name for name, own in _tensors(self.root) if own is t), None)
        if name is None:
            raise self.refuse(why_foreign(t))
        if self.places.get(name) != id(t):
            text = f"it reads {name} after a module has put a new tensor there"
            raise self.refuse(f"{text}; let the module use copy_")
        if name not in self.attributes:
            self.attributes[name] = self.graph.get_attr(name)
            self.values[self.attributes[name]] = t
        return self.attributes[name]

    def arg(self, a: Any) -> Any:
        """Returns ``a`` as an argument of a graph."""
        if isinstance(a, torch.Tensor):
            return self._node(a)
        if isinstance(a, torch.device):
            return self._constant(here) if a.type in ("meta", "cpu") else a
        if isinstance(a, (*PLAIN, enum.Enum)):
            return a

        # containers of these
        if type(a) in (tuple, torch.Size):
            return tuple(map(self.arg, a))
        if type(a) is list:
            return [*map(self.arg, a)]
        if isinstance(a, slice):
            return slice(*map(self.arg, (a.start, a.stop, a.step)))
        if isinstance(a, range):
            return range(a.start, a.stop, a.step)
        if type(a) is dict and all(isinstance(k, str) for k in a):
            return {k: self.arg(v) for k, v in a.items()}
        return self._object(a)

    def _object(self, a: Any) -> Any:
        if any(True for _ in inside(a)):
            return self._container(a)
        if isinstance(a, np.generic | np.ndarray) and a.ndim == 0:
            return a.item()

        # objects with state, of which every stage would have a copy
        if isinstance(a, torch.Generator):
            raise self.refuse(
                "it draws from a generator of its own, of which every stage would have a separate copy"
            )
        if isinstance(a, nn.Module):
            raise self.refuse(f"it passes the module {type(a).__name__} to a function")

        # functions and objects, unless they are immutable
        if callable(a):
            captured = captured_state(a)
            if captured:
                name = getattr(a, "__qualname__", type(a).__name__)
                raise self.refuse(f"it passes on the function {name}, which holds {captured}")
        elif id(a) not in self.before and not is_frozen(a):
            text = (
                f"it makes a {type(a).__name__} and passes it on, so every stage would have "
                "a separate copy of it"
            )
            cache = "; a cache is of no use in training: set use_cache=False in the model's configuration"
            raise self.refuse(text + cache * type(a).__name__.endswith("Cache"))

        return self._constant(a)

    def _container(self, a: Any) -> fx.Node:
        """Adds a node that rebuilds a container of tensors, in each stage that uses it."""
        name = type(a).__name__
        args, kwargs = contents(a)
        if args is None:
            raise self.refuse(f"it passes on a {name}, which cannot be rebuilt on another stage")
        made = Rebuilt(lambda *xs, **ks: remade(type(a), *xs, **ks), name)
        items = tuple(map(self.arg, args))
        node = self.graph.call_function(made, items, {k: self.arg(v) for k, v in kwargs.items()})
        self.values[node] = a
        return node

    def _constant(self, a: Any) -> fx.Node:
        node = self.graph.call_function(here if a is here else ConstantFunction(a))
        self.values[node] = torch.device("meta") if a is here else a
        return node


def saved_tensor_hooks() -> Any:
    """Returns the saved-tensor hooks; torch's own (checkpoint, save_on_cpu) restore the same values."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _tensors(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(), *root.named_buffers()]


@contextmanager
def recording_calls(capture: Capture) -> Iterator[None]:
    """Passes calls of leaves, autograd functions and torch functions through ``capture`` while entered."""
    patched: list[tuple[Any, Any]] = []

    def patch(owner: Any) -> None:
        plain = owner.__call__

        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = capture.leaves.get(id(module))
            if capture.eager or name is None:
                return plain(module, *args, **kwargs)
            return capture.call(GlueCall("call_module", name, module, args=args, kwargs=kwargs))

        patched.append((owner, plain))
        owner.__call__ = calling

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if capture.eager:
            return apply.__get__(None, cls)(*args, **kwargs)
        func = NamedFunction(lambda *xs, **ks: cls.apply(*xs, **ks), cls.__name__)
        return capture.call(GlueCall("call_function", func, func, args=args, kwargs=kwargs))

    def variable(cls: Any, data: Any = None, requires_grad: bool = False, *rest: Any, **named: Any) -> Any:
        """Returns what torch.autograd.Variable, which no mode sees, returns for a tensor."""
        if not isinstance(data, torch.Tensor) or rest or named:
            return type.__call__(cls, data, requires_grad, *rest, **named)
        detached = data.detach()
        return detached.requires_grad_() if requires_grad else detached

    apply: Any = vars(torch.autograd.Function)["apply"]  # a classmethod; since torch 2.14 one written in C
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    variables: Any = type(torch.autograd.Variable)
    variables.__call__ = variable

    try:
        leaves = {type(m) for m in capture.root.modules() if id(m) in capture.leaves}
        for owner in {nn.Module, *(k for k in leaves if "__call__" in vars(k))}:
            patch(owner)
        with capture:
            capture.stream, capture.hooks = generator_state(torch.default_generator), saved_tensor_hooks()
            capture.modes_below = torch._C._len_torch_dispatch_stack()
            yield
    finally:
        for owner, plain in patched:
            owner.__call__ = plain
        del variables.__call__
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
