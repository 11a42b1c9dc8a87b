"""Recomputes the forward of a module in its backward, with torch's non-reentrant checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.errors import Problem, RequestError
from launcher.parallel import selective_recompute
from launcher.parallel.cost.saved_hooks import AGAIN, KEEPING, PLAIN, Sent
from launcher.parallel.dispatch.containers import filled
from launcher.parallel.dispatch.modes import tree_leaves
from launcher.parallel.model_state.library_attributes import names_read
from launcher.parallel.model_state.module_globals import files_of, variables, variables_named
from launcher.parallel.model_state.python_state import PythonState, changed, library, snapshot, untouched
from launcher.parallel.model_state.shared_state import code_of_forwards, lost, names_used
from launcher.parallel.selective_recompute import RecomputedCalls, ReportKeptResults
from launcher.parallel.sequence_chunks import Carry
from launcher.parallel.tensor_parallel.collectives import Axis, CollectiveResults
from launcher.plan.values.recomputed_module import Recomputed

NO_HOOKS = "don't yet support saved tensor hooks"
"""Part of the message of the error that torch.func raises under a checkpoint."""


def install(model: nn.Module, recomputed: Iterable[Recomputed], axis: Axis) -> None:
    """Wraps the forward of each module that the plan recomputes."""
    used = cache(lambda: names_used(model))
    for r in recomputed:
        module = model.get_submodule(r.module)
        forward = RecomputedForward(module, module.forward, r, axis, used)
        vars(forward)["__wrapped__"] = module.forward  # code of the model may ask for its signature
        vars(module)["forward"] = forward


class NotRecomputable(RequestError):
    """``module`` cannot be recomputed, because ``why``."""

    def __init__(self, module: str, why: str) -> None:
        text = f"{module} cannot be recomputed in the backward: {why}; leave {module} out"
        super().__init__((Problem("parallel.recompute.modules", text),))
        self.module, self.why = module, why


@dataclass(frozen=True)
class RecomputedForward:
    """The forward of a module that is recomputed in its backward, around its ``plain`` one.

    ``used`` returns the names whose values the model uses: what it only stores or prints may differ.
    ``carry`` knows the piece of a sequence that runs, if sequences are cut.
    """

    module: nn.Module
    plain: Callable[..., Any]
    recomputed: Recomputed
    axis: Axis
    used: Callable[[], frozenset[str]] = field(compare=False)
    carry: Carry | None = None
    numbers: Iterator[int] = field(default_factory=count, compare=False)
    calls: RecomputedCalls = field(default_factory=RecomputedCalls, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or PLAIN.get():
            return self.plain(*args, **kwargs)
        names = tuple(kwargs)
        region = _Region(self, (args, kwargs))
        self._check_hooks()

        def run(*values: Any) -> Any:
            own = values[: len(values) - len(names)] if names else values
            with region.keeping_error(), _plain():
                return self.plain(*own, **dict(zip(names, values[len(own) :], strict=True)))

        # all by position: torch looks only among positional arguments for devices whose random state to save
        with self._unchanged():
            out = checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=region.contexts)
            region.raise_error()
        return out

    def _check_hooks(self) -> None:
        """Refuses torch.func, which allows no hooks, and saved-tensor hooks, which would not run."""
        if torch._C._are_functorch_transforms_active():
            raise self.not_recomputable(
                "it is called by torch.func (vmap, grad), which cannot be combined with recomputation"
            )
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks and hooks[0].__module__.partition(".")[0] not in ("torch", "launcher"):
            raise self.not_recomputable("the saved_tensors_hooks around it would not see its tensors")

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Checks that the module's second and third forward on a rank do not change state.

        The first may fill caches. The plan checks the same, except for modules that read values.
        """
        watched = not self.axis.planned and next(self.numbers) in (1, 2)
        before = self._state() if watched else ()
        yield
        top = f"{self.recomputed.module}."
        for was, now, prefix in zip(before, self._state() if watched else (), (top, ""), strict=False):
            if changes := changed(was, now):
                raise self.not_recomputable(f"each of its forwards changes {prefix}{changes[0][0]}")

    def _state(self) -> tuple[PythonState, PythonState]:
        """Returns the module's state in Python, and the state of its source files and of the process."""
        return snapshot(self.module), variables(files_of(self.module))

    def state_read(self) -> tuple[PythonState, ...]:
        """Returns the state that the module's code can read: its attributes, and variables that it names.

        Code of libraries reads no such state, and what the recomputation restores is left out.
        """
        if not self.names_read:
            return ()
        own, around = (PythonState(by_value=True, only_plain=True) for _ in range(2))
        for path, module in self.module.named_modules():
            attributes = vars(module) | module._buffers
            for name in attributes.keys() & self.names_read:
                place = f"{path}.{name}".lstrip(".")
                if place not in self.recomputed.restored:
                    own.enter(place, attributes[name])
        for name, value in self._variables():
            around.enter(name, value)
        return own, around

    @cached_property
    def names_read(self) -> frozenset[str]:
        """The names of attributes and variables whose values the code of the module's forward can use.

        There are none in a library's code.
        """
        return names_read(code_of_forwards(self._users)) & self.used() if self._users else frozenset()

    @cached_property
    def _variables(self) -> Callable[[], Iterator[tuple[str, Any]]]:
        return variables_named(files_of(*self._users), self.names_read)

    @property
    def _users(self) -> list[nn.Module]:
        return [m for m in self.module.modules() if not library(type(m).__module__)]

    def not_recomputable(self, why: str) -> RequestError:
        """Returns the error that the module cannot be recomputed."""
        return NotRecomputable(self.recomputed.module, why)


@contextmanager
def _plain() -> Iterator[None]:
    """Runs the recomputed modules that a recomputed forward calls without a checkpoint of their own.

    A plan recomputes no module inside of another one. But a forward may call its own module again, or a
    module from elsewhere in the model, which shows only when it runs.
    """
    token = PLAIN.set(True)
    try:
        yield
    finally:
        PLAIN.reset(token)


class _Region:
    """One call of a module, and its run in the backward."""

    def __init__(self, of: RecomputedForward, arguments: Any) -> None:
        self.of = of
        self.piece = of.carry.now if of.carry is not None else None
        self.results = None if of.recomputed.comm else CollectiveResults()
        self.last = of.axis.last  # operators may share inputs that earlier ones have gathered
        self.inputs = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        self.versions = _versions(self.inputs)
        self.changed = filled(arguments, objects=True)
        self.streams = _streams()
        self.state: tuple[PythonState, ...] = ()  # what its code can read, after its forward
        self.first = True
        self.error: Exception | None = None

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keeps an error of the forward until torch has left its contexts.

        torch 2.11 does not leave them when an error passes. In the second run errors pass: torch itself ends
        that run with one.
        """
        first, self.first = self.first, False
        try:
            yield
        except Exception as error:
            if not first:
                raise
            self.error = error

    def raise_error(self) -> None:
        try:
            if self.error is not None and NO_HOOKS in str(self.error):
                raise self.of.not_recomputable(
                    "it uses torch.func (grad, vjp), which cannot be combined with recomputation"
                )
            if self.error is not None:
                raise self.error
        finally:
            self.error = None  # frees all tensors that its frames refer to

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns the contexts around the forward, and around its run in the backward."""
        keep = self.of.recomputed.keep
        first, again = self._keeping(keep) if keep else (nullcontext(), nullcontext())
        return self._running(first), _Entered(lambda: self._again(again))

    def _keeping(
        self, keep: tuple[str, ...]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Returns contexts that keep the results of calls, or of operations.

        Operations are used if calls do not suffice, or if the planner counts operations.
        """
        calls = self.of.calls
        counted = KEEPING.get() is not None or AGAIN.get() is not None
        if counted or calls.by_operation or self.of.recomputed.by_operation:
            return selective_recompute.operation_contexts(keep)
        return selective_recompute.contexts(self.of.recomputed.module, keep, calls, self.of.not_recomputable)

    @contextmanager
    def _running(self, keeping: AbstractContextManager[Any]) -> Iterator[None]:
        tell, keep = KEEPING.get(), self.of.recomputed.keep
        telling = (
            ReportKeptResults(keep, tell, self.of.not_recomputable)
            if tell is not None and keep
            else nullcontext()
        )
        axis = self.of.axis
        before, axis.results = axis.results, self.results
        try:
            with telling, keeping:
                yield
        finally:
            axis.results = before
        if self.error is not None:
            return

        # check here: later changes come from other code
        self.state = self.of.state_read()
        if _versions(self.inputs) != self.versions:
            raise self.of.not_recomputable("it changes an input in place")
        if self.changed():
            raise self.of.not_recomputable("it changes an argument that is a list, dictionary or dataclass")
        if tell is not None and self.results is not None:
            for t in self.results.kept:
                tell(t)

    @contextmanager
    def _again(self, keeping: AbstractContextManager[Any]) -> Iterator[None]:
        if _versions(self.inputs) != self.versions:
            raise self.of.not_recomputable("one of its inputs was changed in place after its forward")
        if self.changed():
            raise self.of.not_recomputable(
                "one of its arguments (a list, dictionary or dataclass) was changed after its forward"
            )
        top = f"{self.of.recomputed.module}."
        for was, now, prefix in zip(self.state, self.of.state_read(), (top, ""), strict=False):
            if places := lost(was, now, self.of.names_read):
                why = f"{prefix}{places[0]} was changed after its forward, which may read it"
                raise self.of.not_recomputable(why)

        # rewind the kept results, and return to this piece of the sequence
        if self.results is not None:
            self.results.again()
        carry = self.of.carry
        at = carry.again(*self.piece) if carry is not None and self.piece is not None else nullcontext()

        # with the same state, while the meter counts what is sent
        recomputed, module = self.of.recomputed, self.of.module
        around = AGAIN.get()
        counting = around(self._sent) if around is not None else nullcontext()
        restoring = untouched([module], recomputed.restored) if recomputed.restored else nullcontext()

        # operators see the same as in the forward: inputs that earlier ones shared, and kept results
        axis = self.of.axis
        before = axis.last, axis.results, axis.log
        axis.last, axis.results = self.last, self.results
        axis.log = None if around is None else []
        try:
            with at, restoring, _drawing(self.streams), counting, keeping:
                yield
        finally:
            axis.last, axis.results, axis.log = before

    def _sent(self) -> Sent:
        """Returns what the run in the backward has sent over tp so far: nothing if results are kept."""
        log = self.of.axis.log or []
        return [(c.op, c.nbytes) for c in log if c.phase == "forward" and self.results is None]


class _Entered:
    """A context that is made anew for each entry, because a forward may run again more than once."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make = make
        self.open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self.open.append(self.make())
        self.open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.open.pop().__exit__(*error)


def _streams() -> tuple[Any, Any]:
    """Returns the states of Python's and numpy's random streams; torch's checkpoint restores torch's own."""
    return random.getstate(), np.random.get_state()


@contextmanager
def _drawing(streams: tuple[Any, Any]) -> Iterator[None]:
    """Lets Python and numpy draw from ``streams``, and restores their states afterwards."""
    before = _streams()
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed in place; 0 for inference tensors, which have no version."""
    return [0 if t.is_inference() else t._version for t in tensors]
