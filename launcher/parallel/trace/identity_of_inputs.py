"""Finds modules whose result changes if their inputs are other objects with the same numbers.

A stage receives plain tensors: leaves that are not views and have no gaps, class or attributes of their own.
Pieces of a sequence are contiguous. FSDP2 passes tensors that need a gradient through a function of autograd,
and rebuilds lists and dictionaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from launcher.parallel.dispatch.containers import clone_with_strides, filled, mapped, tensors
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import AroundSnapshot, contents_put_back, files_of, put_back
from launcher.parallel.trace.mixing_samples import SAMPLES, FixedDraws, alike, numbers_if_too_large, run
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import in_memory, trial_inputs
from launcher.parallel.trace.sample_values import trying
from launcher.parallel.trace.tensor_specs import dims_of

CALLS = 3
"""How many calls of each module are tried."""

IN_PLACE = "used in an in-place operation", "is being modified inplace"
"""Torch's messages when a leaf, or a result of FSDP2's function, is changed in place."""

CALL: Any = nn.Module.__call__
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class InputIdentity:
    """Modules whose result changes if their inputs are other objects with the same numbers.

    ``sent``: tensors as a stage receives them. ``contiguous``: contiguous tensors. ``apart``: several tensors
    in place of one object. ``gathered``: tensors as FSDP2 passes them. ``alone``: the same inputs, but no
    other module has run.
    """

    sent: tuple[str, ...] = ()
    contiguous: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


def input_identity(model: nn.Module, inputs: Sequence[Tensor]) -> InputIdentity:
    """Returns the modules of a user's model that depend on more than the numbers of their inputs.

    Nothing is found for a model that is too large to try, that draws in a way that cannot be fixed, or that
    fails. ``inputs`` are on meta; their number of samples does not matter.
    """
    if not trying() or numbers_if_too_large(model) or any(not x.dim() for x in inputs):
        return InputIdentity()
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]

    # the user's code may raise anything for drawn values; other checks judge the forward
    around = torch.random.fork_rng(devices=[]), streams_kept(), put_back(files_of(model)), torch.enable_grad()
    with ExitStack() as stack, suppress(Exception, SystemExit):
        for each in (*around, default_dtype(torch.float64), torch.device("cpu")):
            stack.enter_context(each)
        xs = [x.double() if x.is_floating_point() else x for x in trial_inputs(some, 0)]
        real = in_memory(model).double()
        stack.enter_context(contents_put_back(real))
        beginning = AroundSnapshot(files_of(model))
        drawn = stack.enter_context(FixedDraws(wide=True))
        steady = alike(run(real, xs), run(real, xs), drawn.close)
        if not steady or drawn.drew:
            return InputIdentity()
        tried = _Tried(real, beginning)
        with tried.watching():
            real(*(x.clone() for x in xs))
        return tried.results()
    return InputIdentity()


class _Unknown(Exception):
    """Raised for a module whose calls cannot be tried, because it changes its arguments."""


class _Tried:
    """Runs copies of modules on other objects, before the modules themselves run."""

    def __init__(self, model: nn.Module, beginning: AroundSnapshot) -> None:
        self.sent: dict[str, None] = {}
        self.contiguous: dict[str, None] = {}
        self.apart: dict[str, None] = {}
        self.gathered: dict[str, None] = {}
        self.alone: dict[str, None] = {}
        self._beginning, self._before = beginning, copied(model)
        self._names = {id(m): name for name, m in model.named_modules() if name and _own_code(m)}
        self._files = files_of(model)
        self._calls: Counter[str] = Counter()
        self._active = False

    def results(self) -> InputIdentity:
        """Returns the modules found so far."""
        return InputIdentity(
            tuple(self.sent),
            tuple(self.contiguous),
            tuple(self.apart),
            tuple(self.gathered),
            tuple(self.alone),
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tries each module that is called while entered."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None or self._active or self._calls[name] >= CALLS:
                return CALL(module, *args, **kwargs)
            self._calls[name] += 1
            others = self._others(name, module, (args, kwargs))
            out = CALL(module, *args, **kwargs)
            for modules, other in others:
                if other is not None and not _same(out, other):
                    modules[name] = None
            if name in self.sent:
                self.apart.pop(name, None)
                self.alone.pop(name, None)
            return out

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = CALL  # type: ignore[method-assign]

    def _others(self, name: str, module: nn.Module, given: Call) -> list[tuple[dict[str, None], Any]]:
        """Returns the results of copies of ``module`` for other objects; ``None`` if one cannot be tried."""
        changes = (
            (self.sent, _as_sent),
            (self.contiguous, _contiguous),
            (self.apart, _each_apart),
            (self.gathered, _as_gathered),
        )
        self._active = True
        try:
            out = [(modules, self._run(module, given, change)) for modules, change in changes]
            if self._calls[name] == 1:  # later ones may depend on its own state
                before = self._before.get_submodule(name)
                _take_tensors(before, module)  # other checks judge changes of parameters and buffers
                out.append((self.alone, self._run(before, given, _as_sent, beginning=True)))
            return out
        finally:
            self._active = False

    def _run(
        self, module: nn.Module, given: Call, change: Callable[[Call, bool], Call], beginning: bool = False
    ) -> Any:
        """Returns the output of a copy, or the error that it raises; ``None`` if that says nothing.

        With ``beginning`` the variables of files have the values that they had before any forward.
        """
        try:
            copy = copied(module)
        except Exception:  # another check reports that
            return None
        kept = [(t, t._version, t.detach().clone()) for t in tensors(given) if not t.is_inference()]
        changed = filled(given, objects=True)
        with streams_kept(), put_back(self._files):
            torch.manual_seed(1)
            if beginning:
                self._beginning.restore()
            for leaves in (True, False):
                try:
                    args, kwargs = change(given, leaves)
                    out = CALL(copy, *args, **kwargs)
                except Exception as error:  # the user's code may raise anything
                    if any(message in str(error) for message in IN_PLACE):
                        if leaves:
                            continue  # a stage clones what its module changes in place
                        return None  # another check refuses that for FSDP2
                    out = error
                break
        if changed() or any(t._version != version for t, version, _ in kept):
            raise _Unknown
        return out


@torch.no_grad()
def _take_tensors(module: nn.Module, other: nn.Module) -> None:
    """Gives the parameters and buffers of ``module`` the values of those of ``other`` with the same names."""
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        values = dict(named(other))
        for name, t in named(module):
            if name in values and values[name].shape == t.shape:
                t.copy_(values[name])


def _own_code(module: nn.Module) -> bool:
    """Returns true if a class in ``module`` is the user's: torch's own compute with numbers alone."""
    return any(not type(m).__module__.startswith("torch.") or "forward" in vars(m) for m in module.modules())


def _as_sent(given: Call, leaves: bool) -> Call:
    made: dict[int, Tensor] = {}
    return _mapped(given, lambda t: made.setdefault(id(t), _bare(t, leaves)))


def _contiguous(given: Call, leaves: bool) -> Call:
    made: dict[int, Tensor] = {}
    return _mapped(given, lambda t: made.setdefault(id(t), _bare(t, leaves, torch.contiguous_format)))


def _each_apart(given: Call, leaves: bool) -> Call:
    return _mapped(given, lambda t: _bare(t, leaves))


def _mapped(given: Call, change: Callable[[Tensor], Tensor]) -> Call:
    args, kwargs = given
    return tuple(mapped(a, change) for a in args), {k: mapped(v, change) for k, v in kwargs.items()}


def _bare(t: Tensor, leaf: bool, form: torch.memory_format = torch.preserve_format) -> Tensor:
    with torch._C.DisableTorchFunction():
        plain = t.detach().as_subclass(Tensor)
        out = plain.clone(memory_format=form if dims_of(plain) else torch.contiguous_format)
        if not t.requires_grad:
            return out
        out = out.requires_grad_()
        return out if leaf else out.clone()


def _as_gathered(given: Call, leaves: bool) -> Call:
    flat, tree = pytree.tree_flatten(given)
    places = [n for n, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
    if places:
        passed = _Passed.apply(*(clone_with_strides(flat[n]) for n in places))  # type: ignore[no-untyped-call]
        for n, t in zip(places, passed, strict=True):
            flat[n] = t
    args, kwargs = pytree.tree_unflatten(flat, tree)
    return args, kwargs


class _Passed(torch.autograd.Function):
    """Returns its inputs, as FSDP2's own function does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _same(out: Any, other: Any) -> bool:
    """Returns true if two outputs have the same numbers, up to rounding."""
    if isinstance(other, Exception):
        return False
    a, b = tensors(out), tensors(other)
    if [(t.shape, t.dtype) for t in a] != [(t.shape, t.dtype) for t in b]:
        return False
    plain = [[t.detach().as_subclass(Tensor) for t in some if not t.is_complex()] for some in (a, b)]
    return alike(plain[0], plain[1], 1e-9)
