"""Gives values to modules that read data: the first samples of the data set, and the constructor's weights.

A plan traces a forward on meta tensors. For a few batches it still knows the values of inputs, and of tensors
that are computed from inputs and constants alone, such as masks, lengths and positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from launcher.parallel.dispatch.modes import Dispatch, default_dtype, tree_leaves, tree_map_only
from launcher.plan.values.model_graph import EmbeddingLookup

aten = torch.ops.aten
EMBEDDINGS = (aten.embedding.default, aten._embedding_bag.default)
INDEXED = (aten.index_select.default, aten.gather.default)
"""Each is called with the dim that it looks up."""

SAME = frozenset({
    aten._to_copy.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default,
    aten.detach.default, aten.expand.default, aten.permute.default, aten.squeeze.default,
    aten.squeeze.dim, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.view.default,
})  # fmt: skip
"""Operations whose result has exactly the values of their first argument."""
SHIFTS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}

FEW = 1 << 24
"""The most elements of a module or batch to try with values; larger ones are zeros that take no memory."""


@dataclass(frozen=True)
class TrialValues:
    """Values to try a forward with.

    Attributes:
        batches: batches of the inputs, with samples in dim 0; a larger batch repeats their samples in turn.
            The first batch is tried first; the others may differ in lengths, ids and so on.
        initial: returns the constructor's values of a tensor, by its name.
        spread: returns up to so many samples from all over the data; none if only the first can be read.
    """

    batches: tuple[tuple[Tensor, ...], ...]
    initial: Callable[[str], Tensor]
    spread: Callable[[int], tuple[Tensor, ...]] = lambda count: ()


_TRIAL: ContextVar[TrialValues | None] = ContextVar("trial", default=None)


@contextmanager
def using_trial_values(trial: TrialValues | None) -> Iterator[None]:
    """Tries modules that read values, inside the block, with the values of ``trial``; zeros for ``None``."""
    token = _TRIAL.set(trial)
    try:
        yield
    finally:
        _TRIAL.reset(token)


@contextmanager
def spread_samples(count: int) -> Iterator[bool]:
    """Makes ``count`` samples from all over the data the only batch; yields false if these are unknown."""
    trial = _TRIAL.get()
    spread = trial.spread(count) if trial is not None else ()
    if trial is None or not spread:
        yield False
        return
    with using_trial_values(replace(trial, batches=(spread,))):
        yield True


def initial(name: str, t: Tensor) -> Tensor | None:
    """Returns the constructor's values for ``t``; ``None`` if they are unknown, or ``t`` is only a part."""
    trial = _TRIAL.get()
    if trial is None:
        return None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.device("cpu"):
            value = trial.initial(name)
    except Exception:  # it cannot be made alone; the rank will report that
        return None
    return value.to(t.dtype) if value.shape == t.shape else None


def trying() -> bool:
    """Returns true if there are values to try modules with."""
    return _TRIAL.get() is not None


@dataclass(eq=False)
class _Call:
    """An operation on values, which runs when its results are needed; ``results`` has them for each batch.

    Most results are never needed, and a model that makes a mask in each layer would fill gigabytes with them.
    """

    func: Any
    inputs: Any
    results: list[list[Tensor]] | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def run(self, batches: int) -> list[list[Tensor]]:
        """Runs the call after the calls that it depends on.

        This does not recurse: a chain of calls may be longer than Python's stack.
        """
        waiting = [self]
        while waiting:
            call = waiting[-1]
            calls = [v.call for v in tree_leaves(call.inputs) if isinstance(v, _Values)]
            if earlier := [c for c in calls if c.results is None]:
                waiting += earlier
                continue
            if call.results is None:
                call.results = [call._carried_out(batch) for batch in range(batches)]
                call.inputs = ()
            waiting.pop()
        assert self.results is not None
        return self.results

    def _carried_out(self, batch: int) -> list[Tensor]:
        """Runs the operation on the values of one batch; returns nothing if they are not known."""
        with (
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            default_dtype(self.dtype),
        ):
            try:
                args, kwargs = tree_map_only(_Values, lambda v: v.computed[batch], self.inputs)
                out = self.func(*args, **kwargs)
            except (RuntimeError, IndexError, NotImplementedError):  # then the values are unknown
                return []
        return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


@dataclass(frozen=True, eq=False)
class _Values:
    """The values of a tensor like ``spec`` for each batch: the result of ``call`` at the index ``at``."""

    call: _Call
    at: int
    spec: tuple[torch.Size, torch.dtype]

    @property
    def computed(self) -> list[Tensor]:
        """The values, once ``call`` has run; empty if they are unknown."""
        results = self.call.results or []
        values = [each[self.at] for each in results if self.at < len(each)]
        known = len(values) == len(results) and all((v.shape, v.dtype) == self.spec for v in values)
        return values if known else []


class SampleValues(Dispatch):
    """Tracks the values of tensors that depend on ``inputs`` and constants, during a forward on ``inputs``.

    ``beyond`` has the modules that look up an id outside of their table, with the table's rows and the id.
    ``lookups`` has the inputs that are ids of tables; a rank checks them in each batch.
    """

    def __init__(self, inputs: Sequence[Tensor], running: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.beyond: dict[str, tuple[int, int]] = {}
        self.lookups: dict[EmbeddingLookup, None] = {}
        trial = _TRIAL.get()
        batches = trial.batches if trial is not None else ()
        self.batches = len(batches)
        self._known: MutableMapping[Tensor, _Values] = WeakIdKeyDictionary()
        self._lost: set[int] = set()
        self._ids: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._of_inputs: dict[int, list[Tensor]] = {}
        for place, t in enumerate(inputs):
            values = [_fitted(batch[place], t) if place < len(batch) else None for batch in batches]
            given = _Call(None, (), [[] if v is None else [v] for v in values])
            self._learn(given, [t])
            if not t.is_floating_point():
                self._of_inputs[place] = self._computed(t)
                self._ids[id(t)] = weakref.ref(t), place, 0

    def follow(self, stand_in: Tensor, t: Tensor) -> None:
        """Registers ``stand_in``, which has the values of ``t`` in memory."""
        values, at = self._find(t), self._input(t)
        if values is not None:
            self._known[stand_in] = values
        if at is not None:
            self._ids[id(stand_in)] = weakref.ref(stand_in), *at

    def of(self, t: Tensor, batch: int = 0) -> Tensor | None:
        """Returns a copy of the values of ``t`` for one of the batches, or ``None``."""
        values = self._computed(t)
        return values[batch].clone() if batch < len(values) else None

    def _find(self, t: Tensor) -> _Values | None:
        values = self._known.get(t)
        return None if values is None or t.untyped_storage()._cdata in self._lost else values

    def _computed(self, t: Tensor) -> list[Tensor]:
        """Returns the values of ``t`` for each batch, or nothing if they are unknown."""
        values = self._find(t)
        if values is None:
            return []
        values.call.run(self.batches)
        return values.computed

    def _learn(self, call: _Call, made: Sequence[Tensor]) -> None:
        """Registers the results of ``call``, unless it has run and they are unknown."""
        for at, t in enumerate(made):
            values = _Values(call, at, (t.shape, t.dtype))
            if call.results is None or values.computed:
                self._known[t] = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.batches:
            return out
        self._count(func, args, out)
        for table, dim, ids in _looked_up(func, args):
            self._look_up(table.shape[dim], ids, wraps=func is aten.index.Tensor)
        arguments = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_meta]
        if not made or not all(t.is_meta and t.layout is torch.strided for t in (*arguments, *made)):
            return out
        known = all(self._find(t) is not None for t in arguments)
        known &= sum(t.numel() for t in made) <= FEW and torch.Tag.nondeterministic_seeded not in func.tags

        # before values change, run all calls that may depend on the present values
        writes = func._schema.is_mutable
        if known and writes:
            for values in list(self._known.values()):
                values.call.run(self.batches)
            known = all(self._computed(t) for t in arguments)
        if not known:
            if writes:
                self._lost |= {t.untyped_storage()._cdata for t in made}
            return out

        # the call, which runs later unless it changes values
        inputs = tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
        call = _Call(func, tree_map_only(Tensor, self._find, inputs))
        if writes:
            call.run(self.batches)
        self._learn(call, made)
        return out

    def _input(self, t: Tensor) -> tuple[int, int] | None:
        """Returns the position of the input that has the values of ``t``, and the number added to it."""
        entry = self._ids.get(id(t))
        return None if entry is None or entry[0]() is not t else entry[1:]

    def _values(self, at: tuple[int, int] | None) -> list[Tensor]:
        """Returns the values of ids in memory that are computed from an input."""
        return [] if at is None else [v + at[1] for v in self._of_inputs.get(at[0], ())]

    def _count(self, func: Any, args: Any, out: Any) -> None:
        """Notes that ``out`` is an input that was only reshaped, or to which a number was added."""
        known = (func in SAME or func in SHIFTS) and isinstance(args[0], Tensor)
        at = self._input(args[0]) if known else None
        if at is None or not isinstance(out, Tensor):
            return
        place, shift = at
        if func in SHIFTS:
            if not isinstance(args[1], int):
                return
            shift += SHIFTS[func] * args[1]
        self._ids[id(out)] = weakref.ref(out), place, shift

    def _look_up(self, rows: int, ids: Tensor, wraps: bool) -> None:
        """Notes the lookup, and ids outside of the table, which a meta tensor does not check."""
        module, at = self.running(), self._input(ids)
        least = -rows if wraps else 0
        if at is not None:
            place, shift = at
            self.lookups[EmbeddingLookup(place, module, rows, least - shift, rows - shift)] = None
        for v in self._computed(ids) or self._values(at):
            if v.numel() and int(v.max()) >= rows:
                self.beyond[module] = rows, max(int(v.max()), self.beyond.get(module, (rows, 0))[1])
            elif v.numel() and int(v.min()) < least:
                self.beyond.setdefault(module, (rows, int(v.min())))


def _looked_up(func: Any, args: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yields the tables of a call, the dim that is looked up, and the ids."""
    if func in EMBEDDINGS:
        yield args[0], 0, args[1]
    elif func in INDEXED and isinstance(args[0], nn.Parameter):
        yield args[0], args[1], args[2]
    elif func is aten.index.Tensor and isinstance(args[0], nn.Parameter) and _only_ids(args[1]):
        yield from ((args[0], dim, t) for dim, t in enumerate(args[1]) if t is not None)


def _only_ids(index: Sequence[Tensor | None]) -> bool:
    """Returns true if all indices are ids.

    A mask indexes as many dims as it has, so the indices after it belong to later dims.
    """
    return all(t is None or t.dtype in (torch.int64, torch.int32) for t in index)


def _fitted(samples: Tensor, t: Tensor) -> Tensor | None:
    """Returns as many samples as ``t`` has, repeated in turn, with sequences cut to its length.

    Returns ``None`` if they are too short.
    """
    if not len(samples) or samples.dim() != t.dim() or t.numel() > FEW:
        return None
    out = samples[torch.arange(t.shape[0], device="cpu") % len(samples)]
    for dim in range(1, t.dim()):
        if out.shape[dim] < t.shape[dim]:
            return None
        out = out.narrow(dim, 0, t.shape[dim])
    return out.to(t.dtype).clone()
