"""Side effects of a forward on tensors: parameters, buffers and what depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from launcher.errors import Problem, RequestError
from launcher.parallel.dispatch.modes import Dispatch, batched, draws, tree_leaves
from launcher.parallel.dispatch.training_mode import is_dropout
from launcher.parallel.trace.tensor_specs import is_sparse
from launcher.plan.values.model_graph import StateChange

ALLOCATE = "allocate all of it in the constructor, or register it with persistent=False"
STALE = "but the optimizer, the ranks and checkpoints use the parameters of the constructor"
EARLIER = "create it in the constructor"
TIE = "tie or create it in the constructor, and change values in torch.no_grad(), by copy_()"
DATA = ""
"""The label of values from inputs, or drawn at random. Other labels are names of buffers."""
Labels = frozenset[str]
NONE: Labels = frozenset()
NUMBERS = (bool, int, float, complex, str)
STATISTICS = frozenset({
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm",
})  # fmt: skip
"""Operations that change running mean and variance, arguments 3 and 4; their schema does not say so."""
SAVE_UNFILLED = frozenset({"rrelu_with_noise", "rrelu_with_noise_"})
"""Operations that save a tensor for the backward before they fill it: torch's checkpoint stops in between."""
FRESH = torch.ops.aten.lift_fresh.default
"""The operation on a new ``torch.tensor``; since torch 2.15 it is seen on meta tensors too."""

ONCE = "embedding_renorm_"
"""An operation that changes nothing when it runs a second time."""


@dataclass
class _Seen:
    """The changes of one tensor.

    ``reported``: an operation other than BatchNorm changed it in place, or its memory was replaced, which
    bypasses autograd. ``once``: only ``ONCE`` has changed it. ``again``: a second forward changes it too.
    """

    labels: Labels = NONE
    reported: bool = False
    once: bool = True
    again: bool = True
    at: dict[str, None] = field(default_factory=dict)


@dataclass
class _Place:
    """The module and attribute of tensor ``t``, with its original memory, dtype and shape."""

    module: nn.Module
    attr: str
    t: Tensor
    name: str
    path: str

    def __post_init__(self) -> None:
        self.memory = self.t.untyped_storage()  # kept, so that its address is not reused
        self.kind = self.t.dtype, self.t.shape


class _Members:
    """The names in a module, at ``path``, before a forward."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path, module
        self._modules = dict(module._modules)
        self._parameters, self._buffers = ({*names} for names in (module._parameters, module._buffers))

    def new(self) -> Iterator[tuple[nn.Module, str, str, str]]:
        """Yields the buffers that a forward has added, each once. Raises ``RequestError`` for parameters."""
        module = self._module
        for name in module._modules.keys() - self._modules.keys():
            if _has_parameters(module._modules[name]):
                self._refuse("makes the module", name)
        for name, was in self._modules.items():
            if module._modules.get(name) is not was and (
                _has_parameters(was) or _has_parameters(module._modules.get(name))
            ):
                self._refuse("removes or replaces the module", name)
        for name in module._parameters.keys() - self._parameters:
            if module._parameters[name] is not None:
                self._refuse("makes the parameter", name)
        for name in module._buffers.keys() - self._buffers:
            self._buffers.add(name)
            yield module, name, self._full(name), self._path

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}".strip(".")

    def _refuse(self, what: str, name: str) -> None:
        text = f"the forward {what} {self._full(name)}"
        raise RequestError((Problem("model", f"{text}, {STALE}; {EARLIER}"),))


def _has_parameters(module: nn.Module | None) -> bool:
    """Returns true if a module has parameters."""
    return module is not None and any(True for _ in module.parameters())


class StateEffects(Dispatch):
    """Tracks effects of a forward of ``model`` while entered; ``running`` names the innermost module.

    ``on_data`` has the operations on values that depend on the inputs or on random numbers, in order.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor], running: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.sparse: dict[str, None] = {}
        self.reads: dict[str, None] = {}
        self.foreign: dict[tuple[int, ...], None] = {}
        self.mixed: dict[str, None] = {}
        self.draws: dict[str, None] = {}
        self.dropouts: set[str] = set()
        self.generators: dict[torch.Generator, dict[str, None]] = {}
        self.saves_unfilled: dict[str, None] = {}
        self.on_data: list[str] = []

        # tensors by id and storage: their names, whether the model made them, and what they depend on;
        # the address of a storage is not reused while a weak reference to it exists
        self._ids: dict[int, str] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._labels: dict[int, tuple[StorageWeakRef, Labels]] = {}
        self._names: dict[int, str] = {}
        self._seen: dict[str, _Seen] = {}

        # how often a storage was written, and the storages that it stands for
        self._writes: Counter[int] = Counter()
        self._same: dict[int, int] = {}
        self._sparse: set[int] = set()

        # what control flow of each running module depends on, after Python has read values; innermost last
        self._control: list[Labels] = [NONE]

        # the model's own tensors: their modules, and their names
        self._places: list[_Place] = []
        self._unset: list[tuple[nn.Module, str, str, str]] = []
        self._known: dict[int, _Members] = {}
        self._first: dict[str, str] = {}
        self._also: dict[str, dict[str, None]] = {}

        for t in inputs:
            self.make(t)
            self._add(t, frozenset({DATA}))
        for path, module in model.named_modules():
            self.learn(path, module)
        paths = {id(module): path for path, module in model.named_modules()}
        for path, module in model.named_modules(remove_duplicate=False):  # several modules may contain one
            for attr in (*module._parameters, *module._buffers):
                name = self._first.get(f"{paths[id(module)]}.{attr}".strip("."))
                if name is not None:
                    self._also[name].setdefault(f"{path}.{attr}".strip("."))

    def mark(self) -> Callable[[], None]:
        """Returns a function that drops everything recorded from now on."""
        seen = {n: replace(s, at=dict(s.at)) for n, s in self._seen.items()}
        sparse = dict(self.sparse)
        reads = dict(self.reads)
        foreign = dict(self.foreign)
        mixed = dict(self.mixed)
        control = list(self._control)
        operations = len(self.on_data)

        def back() -> None:
            del self.on_data[operations:]
            self._seen, self._control = seen, control
            self.sparse, self.reads, self.foreign, self.mixed = sparse, reads, foreign, mixed

        return back

    def compare(self, second: StateEffects) -> None:
        """Notes which tensors a ``second`` forward of the same model does not change.

        They are caches only if both forwards do the same with data.
        """
        alike = self.on_data == second.on_data
        for name, seen in self._seen.items():
            seen.again = name in second._seen or not alike

    @property
    def changed(self) -> int:
        """The number of tensors that have changed."""
        return len(self._seen)

    def learn(self, path: str, module: nn.Module) -> None:
        """Registers the tensors of ``module``, which may be a copy of the one in the model."""
        if id(module) in self._known:
            return
        self._known[id(module)] = _Members(path, module)
        if is_dropout(module):
            self.dropouts.add(path)
        for attr, t in (*module._parameters.items(), *module._buffers.items()):
            full = f"{path}.{attr}" if path else attr
            if t is None and attr in module._buffers:
                self._unset.append((module, attr, full, path))
            if t is None or t.layout is not torch.strided or batched(t):
                continue

            # by its first name, which the same tensor of a copy has too
            name = self._first.setdefault(full, self._names.setdefault(_key(t), full))
            self._also.setdefault(name, {})[full] = None
            self._names[_key(t)] = name
            self._places.append(_Place(module, attr, t, name, path))
            self.make(t)
            if attr in module._buffers:
                self._ids[id(t)] = full
                self._add(t, frozenset({name}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is FRESH:
            self.make(args[0])
        self._read((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        for t in _tensors((out,)):
            self.make(t)
        packet, written, sparse = _schema_effects(func)
        if packet in STATISTICS:
            self._statistics(args, out)
            return out

        # what its results, and the tensors that it writes to, depend on
        labels = self._of(_tensors((*args, *kwargs.values()))) | self._control[-1]
        if draws(func, args, kwargs):
            labels |= {DATA}
            self.draws[self.running()] = None
            if isinstance(generator := kwargs.get("generator"), torch.Generator):
                self.generators.setdefault(generator, {})[self.running()] = None
            if packet in SAVE_UNFILLED:
                self.saves_unfilled[self.running()] = None
        if DATA in labels:
            self.on_data.append(packet)
        if labels:
            for t in _tensors((out,)):
                self._add(t, labels)
        for at, name in written:
            for t in _tensors((args[at] if at < len(args) else kwargs.get(name),)):
                self._write(t, labels, declared=True, once=packet == ONCE)
        if sparse is not None and (args[sparse] if sparse < len(args) else kwargs.get("sparse")):
            self.sparse[self._names.get(_key(args[0]), self.running())] = None
        return out

    def _statistics(self, args: Any, out: Any) -> None:
        training = args[5] if isinstance(args[5], bool) else True
        if training and len(args[0]) > 1:  # instance norm has its samples among the channels
            self.mixed[self.running()] = None
        labels = self._of(_tensors(args[: 3 if training else 5])) | self._control[-1]
        for t in _tensors((out,)):
            self._add(t, labels)
        for t in _tensors(args[3:5] if training else ()):
            self._write(t, labels, declared=False)

    def make(self, t: Tensor) -> None:
        """Notes that ``t`` is not foreign."""
        if t.layout is torch.strided and _key(t) not in self._made:
            self._made[_key(t)] = StorageWeakRef(t.untyped_storage())

    def follow(self, stand_in: Tensor, t: Tensor) -> None:
        """Registers ``stand_in`` for ``t``: it depends on the same."""
        self.make(stand_in)
        if self.memory(t) != (key := self.memory(stand_in)):
            self._same[key] = self.memory(t)
        if is_sparse(t):
            self._sparse.add(self.memory(stand_in))
        labels = self._of((t,))
        if labels:
            self._add(stand_in, labels)

    def memory(self, t: Tensor) -> int:
        """Returns a number that tensors share if they share memory, or if their stand-ins do."""
        key = 0 if batched(t) or t.is_nested else _key(t)
        while key in self._same:
            key = self._same[key]
        return key

    def is_sparse(self, t: Tensor) -> bool:
        """Returns true if ``t`` is a sparse tensor, or a dense one on meta that stands for a sparse one."""
        with torch._C.DisableTorchFunction():
            return is_sparse(t) or self.memory(t) in self._sparse

    def writes(self, t: Tensor) -> int:
        """Returns how often the memory of ``t`` was written, also by ``t.data``, past autograd."""
        with torch._C.DisableTorchFunction():
            return self._writes[self.memory(t)]

    def by_data(self, value: Any) -> bool:
        """Returns true if ``value`` is a tensor that depends on the inputs or on random numbers."""
        return isinstance(value, Tensor) and DATA in self._of((value,))

    def buffer_names(self, t: Tensor) -> list[str]:
        """Returns the names of a buffer of the model, the first module's first; none for other tensors."""
        name = self._ids.get(id(t))
        return [] if name is None else [*dict.fromkeys((name, *self._also[self._first[name]]))]

    def look(self, values: Any) -> None:
        """Notes that Python reads ``values``: everything that the module does now depends on them."""
        self._control[-1] |= self._of(_tensors((values,)))

    def enter(self) -> None:
        """Notes that a module begins to run."""
        self._control.append(self._control[-1])

    def leave(self, output: Any) -> None:
        """Notes that a module ends.

        If its output contains plain values, its caller depends on all that the module has read.
        """
        control = self._control.pop()
        if control and any(isinstance(v, NUMBERS) for v in tree_leaves(output)):
            self._control[-1] |= control

    def _read(self, value: Any) -> None:
        for t in _tensors(value):
            name = self._ids.get(id(t))
            if name:
                self.reads[name] = None
            if t.is_meta and t.layout is torch.strided and _key(t) not in self._made:
                self.foreign[tuple(t.shape)] = None

    def _of(self, tensors: Iterable[Tensor]) -> Labels:
        return NONE.union(*(self._labels[k][1] for k in map(_key, tensors) if k in self._labels))

    def _add(self, t: Tensor, labels: Labels) -> None:
        if t.layout is torch.strided:
            self._labels[_key(t)] = StorageWeakRef(t.untyped_storage()), labels | self._of((t,))
        else:  # a sparse tensor: everything that the module does now may depend on it
            self._control[-1] |= labels

    def _write(self, t: Tensor, labels: Labels, declared: bool, once: bool = False) -> None:
        self._add(t, labels)
        self._writes[self.memory(t)] += 1
        name = self._names.get(_key(t))
        if name is not None:
            seen = self._seen.setdefault(name, _Seen())
            seen.labels |= labels
            seen.reported |= declared
            seen.once &= once
            seen.at[self.running()] = None

    def settle(self) -> None:
        """Notes tensors with new memory at the end of a forward; they count as changed in later forwards too.

        Raises ``RequestError`` for parameters that the optimizer would not know, and for buffers of the
        state dict that checkpoints would not know.
        """
        for members in self._known.values():
            self._unset += members.new()

        # buffers that were None may now be tensors
        for module, attr, name, path in self._unset:
            now = getattr(module, attr, None)
            labels = self._of((now,)) if isinstance(now, Tensor) else NONE
            if DATA not in labels:
                continue
            if attr not in module._non_persistent_buffers_set:
                text = f"the forward makes the buffer {name}"
                why = "checkpoints would not contain it"
                raise RequestError((Problem("model", f"{text}, but {why}; {ALLOCATE}"),))
            self._seen[name] = _Seen(labels | {name}, once=False, at={path: None})
            self._also[name] = {name: None}

        # a replaced tensor, or the same one with other memory (``p.data = ...``)
        for place in self._places:
            now = getattr(place.module, place.attr, None)
            if not isinstance(now, Tensor):
                continue
            if isinstance(now, nn.Parameter) and now is not place.t:
                text = f"the forward puts another parameter in the place of {place.name}"
                raise RequestError((Problem("model", f"{text}, {STALE}; {TIE}"),))
            if place.attr in place.module._buffers.keys() - place.module._non_persistent_buffers_set:
                _as_large(place.name, place.kind, now)

            if now.layout is torch.strided and _key(now) != place.memory._cdata:
                seen = self._seen.setdefault(place.name, _Seen())
                seen.labels |= self._of((now,))
                seen.once = False
                seen.at[place.path] = None
                if now is place.t:  # a backward that needs it reads the new memory
                    seen.reported = True
                    self._names[_key(now)] = place.name
                place.t, place.memory = now, now.untyped_storage()

    def changes(self, output: Any, kept: set[int]) -> tuple[StateChange, ...]:
        """Returns the changes. ``kept`` has the storages that a backward needs."""
        # which outputs and backwards depend on them
        needed = {self._names[k] for k in kept if k in self._names}
        reached = self._reached(self._of(t for t in tree_leaves(output) if isinstance(t, Tensor)))
        reached |= {name for _, _, name, _ in self._unset}  # a later forward may use it in any way

        return tuple(
            StateChange(
                names=tuple(self._also[n]),
                by_data=DATA in s.labels,
                read=n in reached,
                kept=s.reported and n in needed,
                at=tuple(s.at),
                once=s.once,
                cached=not s.again and DATA not in s.labels,
            )
            for n, s in self._seen.items()
        )

    def _reached(self, labels: Labels) -> Labels:
        """Adds the labels that changed buffers among ``labels`` depended on before."""
        before = None
        while labels != before:
            before = labels
            labels = labels.union(*(self._seen[n].labels for n in labels if n in self._seen))
        return labels


def _as_large(name: str, was: tuple[torch.dtype, torch.Size], now: Tensor) -> None:
    """Refuses a buffer of the state dict that changes shape or dtype."""
    if was != (now.dtype, now.shape):
        kinds = [f"{str(d).removeprefix('torch.')} {tuple(s)}" for d, s in (was, (now.dtype, now.shape))]
        text = f"the forward changes the buffer {name} to {kinds[1]}, but checkpoints expect {kinds[0]}"
        raise RequestError((Problem("model", f"{text}; {ALLOCATE}"),))


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else -id(t)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, tuple | list):
            yield from _tensors(v)


@cache
def _schema_effects(func: Any) -> tuple[str, tuple[tuple[int, str], ...], int | None]:
    """Returns an operator's name, the arguments that it writes, and that for sparse gradients."""
    arguments = list(enumerate(func._schema.arguments))
    written = tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    sparse = next((n for n, a in arguments if a.name == "sparse"), None)
    return func._schema.name.removeprefix("aten::"), written, sparse
