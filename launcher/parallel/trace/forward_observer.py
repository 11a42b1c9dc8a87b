"""Observes a forward: which modules run, and which values they use and change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from threading import get_ident
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from launcher.errors import Problem, RequestError
from launcher.parallel.dispatch.containers import filled
from launcher.parallel.dispatch.modes import Surroundings, batched, tree_leaves
from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.model_state.hooks import REGISTER, pre_hook_uses_weights, uses_weights
from launcher.parallel.model_state.module_globals import files_of, variables
from launcher.parallel.model_state.python_state import Key, changed, library, owns_generator, snapshot
from launcher.parallel.model_state.references import forget
from launcher.parallel.trace.data_dependence import Sized
from launcher.parallel.trace.graph_recorder import saved_tensor_hooks
from launcher.parallel.trace.memory_of_results import MemoryOfResults, version
from launcher.parallel.trace.python_streams import streams_now
from launcher.parallel.trace.sample_values import SampleValues
from launcher.parallel.trace.state_around_calls import StateAroundCalls
from launcher.parallel.trace.tensor_side_effects import StateEffects
from launcher.parallel.trace.tensor_specs import dims_of
from launcher.parallel.trace.torch_distributed_reads import world_reads
from launcher.plan.cut.stages import covers
from launcher.plan.values.model_graph import Inner
from launcher.plan.values.module_names import owner


def feeds(made: tuple[torch.Tensor, ...], last: tuple[torch.Tensor, ...]) -> bool:
    """Returns true if autograd's graph leads from every tensor of ``last`` back to one of ``made``."""
    goals = {t.grad_fn for t in made if t.grad_fn is not None}
    if not goals or not last:
        return False
    oldest = min(g._sequence_nr() for g in goals)
    return all(t.grad_fn is not None and reaches(t.grad_fn, goals, oldest) for t in last)


def reaches(start: Any, goals: set[Any], oldest: int) -> bool:
    """Returns true if a path leads from ``start`` to a goal; nodes older than ``oldest`` cannot be on it."""
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        if node is None:  # a tensor of torch.func, whose history is hidden
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= oldest:
                seen.add(following)
                stack.append(following)
    return False


READS = frozenset({
    torch.Tensor.__array__, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__index__,
    torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist,
})  # fmt: skip
"""Functions that pass the values of a tensor to Python."""

NUMBERS = frozenset({
    torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, torch.Tensor.new_tensor,
})  # fmt: skip
"""Functions that make a tensor from Python values; on the meta device they do so without an operation."""

GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
"""Functions that compute gradients."""

GRAD: Any = torch.Tensor.grad
"""The property with the gradient that a backward has left."""

REQUIRES: Any = torch.Tensor.requires_grad
STRIDES = frozenset({torch.Tensor.is_contiguous, torch.Tensor.stride})
"""Functions that return the memory layout of a tensor."""

INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
"""Functions that make tensors of the lists in an index."""

VERSION: Any = torch.Tensor._version
"""The property with the number of changes of a tensor in place."""

DATA: Any = torch.Tensor.data
"""The property by which code changes a tensor without autograd's knowledge."""

DENSE: Any = torch.Tensor.to_dense
TOGGLES = (torch.Tensor.requires_grad_, REQUIRES.__set__)
"""Functions that set whether a tensor requires a gradient."""


CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True)
class ModuleCall:
    """One call of a unit: its arguments, the tensors it ``made``, the bytes ``saved`` for its backward."""

    name: str
    module: nn.Module
    args: Any
    kwargs: Any
    made: tuple[torch.Tensor, ...]
    saved: int


class ForwardObserver(TorchFunctionMode):
    """Records a forward of a model. Its ``units`` are the modules whose calls are recorded one by one.

    Attributes:
        scopes: for each used parameter, the deepest module around it that was running at every use. A weight
            that is used while its own module is not running must be gathered by one that is.
        grads: modules that read a gradient.
        versions: weights whose version a module reads, each with the module.
        state_dicts: modules that call ``state_dict`` or ``load_state_dict``.
        borrowed: modules that use a tensor of another module that is not passed to them, each with its name.
        under: modules that are called while the model's code has entered or replaced something, each with the
            name of what was entered or replaced.
        calls: how often each module ran.
        checkpointed: modules that run inside of a call of torch's checkpoint, each with the module whose code
            makes the outermost such call.
        runs: each call of a unit.
        order: each module as it begins (True) and ends (False).
        looks: modules whose own code read values of tensors while these were real (``looking``).
        looked: how often values were read.
        steers: whether units ran in another order with other values.
        effects: changes of state.
        taken: gradients that the forward computes itself.
        counted: Python state that copies of modules change.
        overwrites: modules that change their inputs in place.
        bypasses: modules that change the memory of their inputs, also by ``.data``.
        results: modules whose results share memory with their inputs, and later changes of either.
        sparse: modules that are called with a sparse tensor that needs a gradient.
        fills: modules that change a list or dictionary among their arguments.
        nested: modules that run inside of themselves.
        inferred: modules that run in inference mode.
        lazy: modules that return a generator, whose code runs after they end.
        strided: modules that query the memory layout of an argument that is not contiguous.
        gapped: the modules of ``strided`` whose argument also has gaps.
        world: modules that query the processes of the run, each with the query.
        global_draws: whether values come from the global random streams of Python or numpy.
        seeds: leaves that seed torch's global stream, "" for the code between leaves.
        moved: whether attributes of modules, or variables of their files, have changed, or may change in a
            forward with values.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[str],
        saved: Callable[[], int],
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()

        # the running modules: stacks of names, arguments, and bytes saved before them
        self.saved = saved
        self.over = False
        self._thread = get_ident()
        self._units = frozenset(units)
        self._running: list[str] = [""]
        self._arguments: list[tuple[torch.Tensor, ...]] = [()]
        self._versions: list[list[int]] = []
        self._writes: list[list[int]] = []
        self._filled: list[Callable[[], bool]] = []
        self._began: list[int] = []

        # which modules use a parameter, and in which order they run
        self.scopes: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.runs: list[ModuleCall] = []
        self.order: list[tuple[str, bool]] = []
        self._names: dict[int, list[str]] = {}
        self._alive: list[nn.Parameter] = []  # a freed parameter's id could be reused
        self._outside = saved_tensor_hooks()
        self._regions: dict[int, list[str]] = {}  # calls of torch's checkpoint, whose modules are recomputed
        self._reentrant: list[int] = []
        self._checkpoints: list[tuple[object, str]] = [
            (None, "")
        ]  # of each running module, and who called it
        self.checkpointed: dict[str, str] = {}

        # modules by what they do, and which of them read values or compute gradients
        self.overwrites: set[str] = set()
        self.bypasses: set[str] = set()
        self.sparse: set[str] = set()
        self.fills: set[str] = set()
        self.nested: set[str] = set()
        self.inferred: set[str] = set()
        self.lazy: set[str] = set()
        self.strided: set[str] = set()
        self.gapped: set[str] = set()
        self.toggles: dict[tuple[str, str], None] = {}
        modules = model.named_modules()
        self.hooks: dict[str, None] = {name: None for name, m in modules if pre_hook_uses_weights(m)}
        self.swapped: set[str] = set()
        self.counted: list[Key] = []
        self.looks: set[str] = set()
        self.looked = 0
        self.steers = False
        self._real = False
        self.taken: list[Inner] = []
        self.grads: dict[str, None] = {}
        self.versions: dict[tuple[str, str], None] = {}
        self.state_dicts: dict[str, None] = {}
        self.borrowed: dict[tuple[str, str], None] = {}
        self.under: dict[str, str] = {}
        self._around = Surroundings(model)
        self._between_calls = StateAroundCalls(model)
        self.world: dict[tuple[str, str], None] = {}
        self.global_draws = False
        self.seeds: tuple[str, ...] = ()
        self.moved = False

        # the model as it was before
        self._paths: dict[int, str] = {id(m): name for name, m in model.named_modules()}
        self._learn("", model)
        self._built = {id(m): {n: id(p) for n, p in m._parameters.items()} for m in model.modules()}
        inputs = tuple(inputs)
        self.effects = StateEffects(model, inputs, lambda: self._running[-1])
        self.results = MemoryOfResults(self.effects)
        self.values = SampleValues(inputs, lambda: self._running[-1])

    def mark(self, effects: bool = True) -> Callable[[], None]:
        """Returns a function that removes the calls recorded since, and if ``effects`` also their effects."""
        scopes = dict(self.scopes)
        calls = Counter(self.calls)
        runs = list(self.runs)
        order = list(self.order)
        forget_effects = self.effects.mark() if effects else lambda: None

        def back() -> None:
            self.scopes, self.calls, self.runs, self.order = scopes, calls, runs, order
            forget_effects()

        return back

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Records modules that read values, which are real while entered."""
        self._real = True
        try:
            with Sized(self.look):
                yield
        finally:
            self._real = False

    def units_below(self) -> bool:
        """Returns true if a module that reads values contains units, and so may decide which of them run."""
        return any(covers(m, u) for m in self.looks for u in self._units - {m})

    def ran(self, since: int) -> list[str]:
        """Returns the units that began after the first ``since`` events."""
        return [name for name, begins in self.order[since:] if begins and name in self._units]

    def look(self, values: Any) -> None:
        """Notes that the innermost running module reads ``values``."""
        self.looks.add(self._running[-1])
        self.looked += 1
        self.effects.look(values)

    def _region(self) -> int | None:
        """Returns the active call of torch's checkpoint, if any; the backward recomputes modules in it."""
        if self._reentrant:
            return self._reentrant[-1]
        now = saved_tensor_hooks()
        inside = now is not None and now != self._outside  # within torch.func.grad there is none
        return id(now[0]) if inside else None

    def _enter_checkpoint(self, name: str) -> None:
        """Notes whether module ``name`` begins inside of a call of torch's checkpoint, and whose that is."""
        around, caller = self._checkpoints[-1]
        region = self._region()
        hooks = saved_tensor_hooks()
        if not self._reentrant and (hooks is None or hooks[0].__module__ != CHECKPOINT):
            region = None  # other hooks recompute nothing
        if around is None and region is not None:
            caller = self._running[-1]
        self._checkpoints.append((region, caller))
        if region is not None:
            self.checkpointed.setdefault(name, caller)

    def recomputed(self) -> tuple[str, ...]:
        """Returns, for each call of torch's checkpoint with several units, the deepest module around them."""
        return tuple(dict.fromkeys(_around(names) for names in self._regions.values() if len(set(names)) > 1))

    def _learn(self, prefix: str, module: nn.Module) -> None:
        for name, p in module.named_parameters(remove_duplicate=False):
            self._alive.append(p)
            full = f"{prefix}.{name}" if prefix else name
            if full not in self._names.setdefault(id(p), []):
                self._names[id(p)].append(full)

    @property
    def running(self) -> str:
        """The innermost running module."""
        return self._running[-1]

    def path(self, module: nn.Module) -> str:
        """Returns the name of a module of the model."""
        return self._paths[id(module)]

    @contextmanager
    def counting(self, module: nn.Module, copy: nn.Module) -> Iterator[None]:
        """Records the Python state that ``copy``, which runs instead of ``module``, changes while entered."""
        path, before = self._paths[id(module)], snapshot(copy)
        yield
        self.counted += [(f"{path}.{name}".strip("."), way) for name, way in changed(before, snapshot(copy))]

    def copied(self, module: nn.Module, copy: nn.Module) -> None:
        """Registers ``copy``, which runs instead of ``module``.

        This registers all of its parts at once: they may change before they run, or without running.
        """
        path = self._paths[id(module)]
        for name, part in copy.named_modules():
            self.effects.learn(f"{path}.{name}".strip("."), part)
        self._learn(path, copy)

    def enter(self, name: str, module: nn.Module, arguments: Any = ()) -> None:
        """Notes that module ``name`` begins to run; it may be a copy of the one in the model."""
        if self.over:
            return

        # check what a plan does not allow
        if get_ident() != self._thread:
            text = f"the forward runs {name} in a separate thread, which the launcher cannot trace"
            raise RequestError((Problem("model", f"{text}; call modules one after the other"),))
        if name in self._running[1:]:
            self.nested.add(name)
        if torch.is_inference_mode_enabled():
            self.inferred.add(name)
        if what := self._around.entered():
            self.under[name] = what
        elif place := self._between_calls.set_since(name):
            self.under[name] = f"another value of {place}"
        own = {n: id(p) for n, p in module._parameters.items()}
        if self._built.get(id(module), own) != own:
            self.swapped.add(name)

        # its arguments, to be compared when it ends
        self._arguments.append(tuple(t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)))
        self._versions.append([version(t) for t in self._arguments[-1]])
        self._writes.append([self.effects.writes(t) for t in self._arguments[-1]])
        if any(t.requires_grad and self.effects.is_sparse(t) for t in self._arguments[-1]):
            self.sparse.add(name)
        self.results.enter(self._arguments[-1])
        self._filled.append(filled(arguments))

        # record that it runs, and learn its tensors
        self._enter_checkpoint(name)
        self._running.append(name)
        self.effects.enter()
        self.order.append((name, True))
        self.calls[name] += 1
        region = self._region() if name in self._units else None
        if region is not None:
            self._regions.setdefault(region, []).append(name)
        self._began.append(self.saved())
        if any(id(p) not in self._names for p in module.parameters(recurse=False)):
            self._learn(name, module)
        self.effects.learn(name, module)

    def leave(self, name: str, module: nn.Module, arguments: tuple[Any, Any], output: Any) -> None:
        """Notes that module ``name`` ends."""
        if self.over or get_ident() != self._thread:
            return
        self._running.pop()
        self._checkpoints.pop()
        self.effects.leave(output)
        self.order.append((name, False))

        # which arguments it has changed, and whether it returns a generator
        before = zip(self._arguments.pop(), self._versions.pop(), self._writes.pop(), strict=True)
        for t, versions, writes in before:
            if t.requires_grad and version(t) != versions:
                self.overwrites.add(name)
            if t.requires_grad and self.effects.writes(t) != writes:
                self.bypasses.add(name)
        self.results.leave(name, output)
        if self._filled.pop()():
            self.fills.add(name)
        if isinstance(output, Iterator | Coroutine):
            self.lazy.add(name)

        # its cost, if it is a unit
        grown = self.saved() - self._began.pop()
        if name in self._units and not any(map(batched, tree_leaves(arguments))):
            args, kwargs = arguments
            made = tuple(t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
            call = ModuleCall(name, module, args=args, kwargs=kwargs, made=made, saved=grown)
            self.runs.append(call)
            self._began = [n + grown for n in self._began]  # the units around it count only the rest
        self._between_calls.end(name)

    def settle(self) -> None:
        """Notes, at the end of the forward, modules that ran with state that has another value by now."""
        for name, place in self._between_calls.settled().items():
            self.under.setdefault(name, f"another value of {place}")
        self.results.settle()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        # before: reads of values and of gradients
        if self._real and func in READS:
            self.look(args)
        if func == GRAD.__get__ and args[0].requires_grad and self._owned(args[0]) and not _moving():
            self.grads[self._running[-1]] = None
        if func == VERSION.__get__ and id(args[0]) in self._names and not _by_library():
            self.versions |= dict.fromkeys((name, self._running[-1]) for name in self._names[id(args[0])])
        if func in STRIDES and not args[0].is_contiguous():
            takes = zip(self._running, self._arguments, strict=True)
            asking = {name for name, taken in takes if any(t is args[0] for t in taken)}
            self.strided |= asking
            self.gapped |= asking if not dims_of(args[0]) else set()
        if func in TOGGLES and isinstance(args[0], nn.Parameter):
            names = self._names.get(id(args[0]), ())
            self.toggles |= dict.fromkeys((name, self._running[-1]) for name in names)
        if func in REGISTER and uses_weights(args[1] if len(args) > 1 else kwargs.get("hook")):
            self.hooks[self._running[-1]] = None
        if func in GRADIENTS:
            self.taken.append(self._inner(func, args, kwargs))
        if func in INDEXING:
            args = (args[0], self._index(args[1], args[0].device), *args[2:])

        out = func(*args, **kwargs)
        if func == DATA.__set__:
            if args[0].requires_grad:
                takes = zip(self._running, self._arguments, strict=True)
                self.overwrites |= {name for name, taken in takes if any(t is args[0] for t in taken)}
            self.results.replaced(args[0])

        if func is DENSE and out is args[0] and self.effects.is_sparse(out):
            out = out.clone()  # a dense tensor on meta stands for the sparse one

        # after: new tensors, and parameters in use
        if func in NUMBERS and all(out is not a for a in args):
            self.effects.make(out)
        if isinstance(out, torch.Tensor | tuple | list):  # not for reads of a property, such as a shape
            for value in (*args, *kwargs.values()):
                for t in value if isinstance(value, tuple | list) else (value,):
                    if not isinstance(t, Tensor):
                        continue
                    if isinstance(t, nn.Parameter) and id(t) in self._names:
                        self._use(self._names[id(t)])
                        self._borrow(self._names[id(t)], t)
                    elif names := self.effects.buffer_names(t):
                        self._borrow(names, t)
        return out

    def _index(self, index: Any, device: torch.device) -> Any:
        """Returns ``index`` with tensors in place of lists: torch's own tensors of them pass no mode."""
        if isinstance(index, tuple):
            return tuple(self._list(i, device) for i in index)
        one = isinstance(index, list) and all(isinstance(i, int) for i in index)  # others are tuples to torch
        return self._list(index, device) if one else index

    def _list(self, index: Any, device: torch.device) -> Any:
        """Returns a tensor of ``index`` if it is a list of integers."""
        leaves = tree_leaves(index) if isinstance(index, list | tuple) else []
        if not leaves or not all(isinstance(i, int) for i in leaves):
            return index
        out = torch.tensor(index, device=device)
        self.effects.make(out)
        return out

    def _owned(self, t: Tensor) -> bool:
        """Returns true if the model has ``t`` as a parameter or buffer."""
        return id(t) in self._names or bool(self.effects.buffer_names(t))

    def _inner(self, func: Any, args: Any, kwargs: Any) -> Inner:
        if func is not torch.autograd.grad:
            return Inner(self._running[-1], backward=True)
        of = args[1] if len(args) > 1 else kwargs.get("inputs")
        nodes = set()
        for t in (t for t in tree_leaves(of) if t.requires_grad):
            with suppress(AttributeError):  # torch.func under vmap hides the node of its inputs
                nodes.add(get_gradient_edge(t).node)
        crosses = []
        for name, arguments in zip(self._running, self._arguments, strict=True):
            # tensors of the same node are the input itself: torch.func takes the gradient of a copy of it
            others = [t.grad_fn for t in arguments if t.grad_fn is not None and t.grad_fn not in nodes]
            if any(reaches(fn, nodes, 0) for fn in others):
                crosses.append(name)
        return Inner(self._running[-1], False, tuple(crosses))

    def _borrow(self, names: list[str], t: Tensor) -> None:
        """Notes a use of ``t`` by modules that neither own it nor get it as an argument."""
        for at, module in enumerate(self._running[1:], 1):
            passed = any(t is other for arguments in self._arguments[at:] for other in arguments)
            if not passed and not any(covers(module, owner(n)) for n in names):
                self.borrowed[module, names[0]] = None

    def _use(self, names: list[str]) -> None:
        """Notes a use of a parameter; if it is tied, its name closest to the running modules counts."""
        seen = {n: max((m for m in self._running if covers(m, owner(n))), key=len) for n in names}
        name = max(names, key=lambda n: (seen[n] == owner(n), len(seen[n])))
        self.scopes[name] = min(self.scopes.get(name, seen[name]), seen[name], key=len)

    def chains(self) -> tuple[tuple[str, str], ...]:
        """Returns pairs (a, b) of units that ran once, b right after a on its output.

        The backward of b then ends before that of a.
        """
        return tuple(
            (a.name, b.name)
            for a, b in zip(self.runs, self.runs[1:], strict=False)
            if self.calls[a.name] == self.calls[b.name] == 1 and feeds(a.made, b.made)
        )


def _hooks_of(model: nn.Module) -> list[list[int]]:
    """Returns the ids of the hooks of each module."""
    return [[*vars(m)[kind]] for m in model.modules() for kind in HOOKS]


def _around(names: list[str]) -> str:
    """Returns the deepest module that contains all of ``names``."""
    same = takewhile(lambda level: len(set(level)) == 1, zip(*(n.split(".") for n in names), strict=False))
    return ".".join(level[0] for level in same)


def _by_library() -> bool:
    """Returns true if the code that called torch is a library's, and not the user's."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":  # of another active mode
        frame = frame.f_back
    return library(frame.f_globals.get("__name__", ""))


def _moving() -> bool:
    """Returns true if torch reads a gradient to move it, because the model calls ``to()`` or the like."""
    frame = sys._getframe(2)
    return frame.f_code is nn.Module._apply.__code__


@contextmanager
def _state_dict_calls(report: Callable[[], None]) -> Iterator[None]:
    """Calls ``report`` each time that ``state_dict`` or ``load_state_dict`` of a module is called."""
    plain = {name: vars(nn.Module)[name] for name in ("state_dict", "load_state_dict")}

    def patched(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            report()
            return method(*args, **kwargs)

        return called

    for name, method in plain.items():
        setattr(nn.Module, name, patched(method))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(nn.Module, name, method)


def _over(*_: object) -> None:
    """Ignores a call of a module after its watch has ended."""


@contextmanager
def watching(
    model: nn.Module, units: Iterable[str], saved: Callable[[], int], inputs: Iterable[torch.Tensor] = ()
) -> Iterator[ForwardObserver]:
    """Watches a forward while entered. ``model`` keeps the hooks, so pass a copy."""
    forget()
    watch = ForwardObserver(model, units, saved, inputs)
    names = files_of(model)
    streams, before, around = streams_now(), snapshot(model), variables(names)

    # watch modules by lambdas: a copy of a module shares them, and so reports to this watch too. They refer
    # to the watch weakly: a graph that recomputes a module keeps its hooks, and the watch keeps the graph
    enter, leave = WeakMethod(watch.enter), WeakMethod(watch.leave)
    for name, module in model.named_modules():
        after = lambda m, args, kwargs, out, name=name: (leave() or _over)(name, m, (args, kwargs), out)  # noqa: E731
        before_call = lambda m, args, kwargs, name=name: (enter() or _over)(name, m, (args, kwargs))  # noqa: E731
        module.register_forward_pre_hook(before_call, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)
    hooked = _hooks_of(model)

    # reentrant checkpoints, which autograd does not show
    reentrant: Any = CheckpointFunction

    def region(*args: Any) -> Any:
        watch._reentrant.append(len(watch.order))
        try:
            return vars(torch.autograd.Function)["apply"].__get__(None, reentrant)(*args)
        finally:
            watch._reentrant.pop()

    reentrant.apply = staticmethod(region)
    try:
        known = watch.values if watch.values.batches else nullcontext()
        record = lambda query: watch.world.setdefault((watch.running, query))  # noqa: E731
        note_call = lambda: watch.state_dicts.setdefault(watch.running)  # noqa: E731
        with world_reads(record), _state_dict_calls(note_call), watch, known, watch.effects:
            yield watch
        watch.effects.settle()
        watch.settle()
        watch.global_draws = streams_now() != streams
        watch.moved = bool(
            watch.counted
            or changed(before, snapshot(model))
            or changed(around, variables(names))
            or _hooks_of(model) != hooked
        )
        watch.moved |= owns_generator(model)
    finally:
        del reentrant.apply
        watch.over = True
        forget()
