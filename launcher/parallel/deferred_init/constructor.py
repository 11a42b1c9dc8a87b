"""Records a constructor on the meta device.

The constructor runs on meta tensors that report the CPU as their device: its code takes the branches of a
plain ``Model()``, but no memory is allocated. The tape keeps every operation; ``replay`` repeats, in real
memory, only those that one tensor needs. Each tensor is the result of the same operations as in a plain
build. Values that are not random, and those that the constructor seeds itself, are the same to the bit. The
others have the same distribution: each draw has its own random stream, derived from the run's seed, so a
tensor has the same values whichever rank makes it, in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import SourceFileLoader
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from launcher.errors import Problem, RequestError, refuse
from launcher.parallel.deferred_init.random_streams import seeded
from launcher.parallel.deferred_init.replay import key, tensors
from launcher.parallel.deferred_init.tape import PlainDraws, Tape, remembered
from launcher.parallel.dispatch.modes import tree_map_only
from launcher.parallel.dispatch.training_mode import in_training
from launcher.parallel.model_state.deep_copy import hooks, keep
from launcher.parallel.model_state.references import (
    OWN,
    arrays_of_parameters,
    computed,
    foreign_memory,
    forget,
    overlaps,
    strangers,
    tensor_attributes,
)

T = torch.Tensor
MEMORY = (
    T.data_ptr, T.untyped_storage, T.storage, T.share_memory_, T.pin_memory, T.__dlpack__, T.__reduce_ex__,
)  # fmt: skip


def _getter(name: str) -> Any:
    return getattr(T, name).__get__


def _requests_meta(func: Any, kwargs: Any) -> bool:
    """Returns true if the caller wants a new tensor on the meta device, by argument or by context."""
    device = kwargs.get("device")
    if device is None and func in _device._device_constructors():
        device = getattr(_device, "CURRENT_DEVICE", None)
    return device is not None and torch.device(device).type == "meta"


def _places(at: Any) -> Any:
    """Returns an index with a tensor in place of each list or array of numbers."""
    if isinstance(at, tuple):
        return tuple(map(_places, at))
    if isinstance(at, np.ndarray):
        return torch.as_tensor(at)
    numbers = isinstance(at, list) and not any(isinstance(a, slice | T | type(None)) for a in at)
    return torch.tensor(at) if numbers and at and at is not Ellipsis else at


class FakeDevice(TorchFunctionMode):
    """Makes meta tensors answer as tensors on the CPU would; fails the tape if the answer is unknown."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.acts: dict[Any, Callable[..., Any]] = {
            # its device
            _getter("device"): lambda t: torch.device("cpu"),
            _getter("is_meta"): lambda t: False,
            _getter("is_cpu"): lambda t: True,
            T.get_device: lambda t: -1,
            # moves to the CPU return the tensor itself
            T.cpu: lambda t, *_, **__: t,
            T.type: self._type,
            T.to: self._to,
            # its values
            T.tolist: lambda t: tape.look(t).tolist(),
            T.numpy: lambda t, *_, **__: tape.show(t),
            T.__array__: lambda t, *args, **kwargs: tape.show(t).__array__(*args, **kwargs),
            T.new_tensor: self._new,
            T.data.__set__: self._data,  # type: ignore[attr-defined]
            # index lists: torch would make a tensor of them without a dispatch
            T.__getitem__: lambda t, at: t[_places(at)],
            T.__setitem__: lambda t, at, value: t.__setitem__(_places(at), value),
            # its memory, which does not exist
            **{func: self._memory(func) for func in MEMORY},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        act = self.acts.get(func)
        if act is not None and isinstance(args[0], T) and self._ours(args[0], func):
            return act(*args, **kwargs)

        # note whether the constructor itself asks for a tensor on the meta device
        self.tape.meta_requested = _requests_meta(func, kwargs)
        if "device" in kwargs and isinstance(kwargs.get("out"), T) and kwargs["out"].is_meta:
            kwargs = kwargs | {"device": torch.device("meta")}

        # functions that read values inside get them from the tape
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "on meta tensors" not in str(error):
                raise
            return self._answer(func, args, kwargs)
        finally:
            self.tape.meta_requested = False

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function that reads values inside (``torch.allclose``), and returns its result."""
        args, kwargs = tree_map_only(T, self.tape.look, (args, kwargs))
        with self.tape.paused():
            out = func(*args, **kwargs)
        if tensors(out):
            self.tape.fail(f"calls {func.__name__}, which reads values of tensors")
        return out

    def _ours(self, t: torch.Tensor, func: Any) -> bool:
        return func == T.data.__set__ or (t.is_meta and key(t) not in self.tape.off)  # type: ignore[attr-defined]

    def _memory(self, func: Any) -> Callable[..., Any]:
        return lambda *_, **__: self.tape.fail(f"calls Tensor.{func.__name__}, which needs its memory")

    def _type(self, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = t.type(*args, **kwargs)
        return out.replace("meta.", "") if isinstance(out, str) else out

    def _to(self, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the tensor itself for ``to("cpu")``, as for a tensor on the CPU."""
        devices = [a for a in (*args[:1], kwargs.get("device")) if isinstance(a, str | torch.device)]
        if any(torch.device(a).type == "meta" for a in devices):
            self.tape.fail("moves a tensor to the meta device")

        # the CPU is the meta device here; the first argument may be a dtype, or a tensor to copy the device
        # from
        if devices and torch.device(devices[0]).type == "cpu":
            meta = torch.device("meta")
            args = tuple(meta if a is devices[0] else a for a in args)
            if "device" in kwargs:
                kwargs = kwargs | {"device": meta}
        return t.to(*args, **kwargs)

    def _new(self, t: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        """Runs ``new_tensor``, which on the meta device would drop the values."""
        kwargs = {"dtype": t.dtype} | {k: v for k, v in kwargs.items() if v is not None and k != "device"}
        if isinstance(data, T):
            data = data.detach().tolist()
        return torch.tensor(data, **kwargs)

    def _data(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Assigns ``t.data``: the new values move to the device of ``t``."""
        if t.is_meta and not value.is_meta:
            value = self.tape.constant(value)
        elif value.is_meta and not t.is_meta:
            value = self.tape.look(value)
        t.data = value


@contextmanager
def _patched(tape: Tape) -> Iterator[None]:
    """Records ``nn.init.trunc_normal_``, which draws again until all values fit, as one operation.

    Files are loaded and modules imported unrecorded, because other code uses their content later.
    """
    truncated = nn.init._no_grad_trunc_normal_

    def taped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tape.one(truncated, tensor, args, kwargs)
        return tensor

    def unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def plain(*args: Any, **kwargs: Any) -> Any:
            with tape.paused():
                return function(*args, **kwargs)

        return plain

    def threaded(*_: Any) -> None:
        tape.fail("starts a thread, which cannot be followed")

    load, run, start = torch.load, SourceFileLoader.exec_module, Thread.start
    nn.init._no_grad_trunc_normal_, torch.load = taped, unrecorded(load)
    SourceFileLoader.exec_module = unrecorded(run)  # type: ignore[method-assign]
    Thread.start = threaded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_, torch.load = truncated, load
        SourceFileLoader.exec_module = run  # type: ignore[method-assign]
        Thread.start = start  # type: ignore[method-assign]


def record(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Tape]:
    """Builds the model, with a tape running. The model's tensors are meta tensors.

    A constructor that cannot be recorded runs in memory, and the tape says ``why``.
    """
    # build without values
    tape = Tape(seed)
    try:
        with seeded(seed), _plain_device(), tape, FakeDevice(tape), _patched(tape):
            model = in_training(build)
        _emptied(_checked(model, tape, lambda t: key(t) in tape.off), tape)
        tape.finish(model)
    except RequestError:
        raise
    except Exception as error:
        # a gap of the recording; the plain build raises an error of the constructor again
        tape.why = tape.why or f"cannot be recorded: {type(error).__name__}: {' '.join(str(error).split())}"

    # a later construction may find tensors of this one in a cache
    Tape.past[:-3] = []
    Tape.past.append(tape)
    forget()

    # or build with values
    if tape.why:
        with seeded(seed), _plain_device():
            model = in_training(build)
        model = _emptied(_checked(model, tape, lambda t: t.is_meta), Tape())
    return model, tape


def _checked(model: nn.Module, tape: Tape, away: Callable[[torch.Tensor], bool]) -> nn.Module:
    """Returns ``owned(model)``; the tape keeps the facts that replacing tensors loses.

    ``away``: as in ``strangers``.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    of = {key(p): name for name, p in trained if not nn.parameter.is_lazy(p)}
    shown = [(array, of[k]) for array, k in tape.shown if k in of]
    refuse([*strangers(model, away), *arrays_of_parameters(model, shown)])
    tape.computed, tape.marks = computed(model), tensor_attributes(model)
    model = owned(model)
    given = {k: t for t, k in tape.given}
    tape.foreign_memory = foreign_memory(model, lambda t: given.get(key(t), t))
    tape.given.clear()  # some of them may be large, and nothing else needs them
    tape.shared = overlaps(model)
    return model


def _plain_device() -> AbstractContextManager[Any]:
    """Returns a context with the CPU as the default device, if another is the default."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def build_in_memory(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns the full model with its values, in memory: as after ``torch.manual_seed(seed)``."""
    with seeded(seed), _plain_device():
        model = owned(in_training(build))
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, t in store.items():
                value = remembered(t) if t is not None and t.is_meta else None
                if value is None:
                    continue
                if isinstance(t, nn.Parameter):
                    value = nn.Parameter(value, t.requires_grad)
                store[name] = value  # type: ignore[assignment]
    return model


def build_with_draws(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns the model with its values, built in memory by the operations themselves.

    It draws the same random numbers as a recording from this seed, so a replay must give the same values.
    """
    tape = PlainDraws(seed)
    with seeded(seed), _plain_device(), tape, _patched(tape):
        return owned(in_training(build))


def unknown(model: nn.Module, tape: Tape) -> list[str]:
    """Returns the names of tensors that the tape cannot reproduce."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [n for n, t in named if tape.why or key(t) not in tape.log.touched or key(t) in tape.off]


def owned(model: nn.Module) -> nn.Module:
    """Turns attributes that are tensors into non-persistent buffers, so that they get values and a device.

    Raises ``RequestError`` for tensors that cannot be placed.
    """
    # parameters and buffers, as they are
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(t):
            text = f"{name} has no shape before the first forward; give its module the size of its input"
            raise RequestError((Problem("model", text),))
        _refuse_sparse(name, t)

    # tensors in plain attributes; one that several modules have stays one, as a buffer may be
    buffers: dict[int, torch.Tensor] = {}
    alive: list[torch.Tensor] = []  # the id of a freed tensor could be reused
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in OWN or isinstance(value, nn.Parameter):
                continue
            if isinstance(value, torch.Tensor):
                _refuse_sparse(f"{path}.{name}".lstrip("."), value)
                delattr(module, name)
                alive.append(value)
                module.register_buffer(name, buffers.setdefault(id(value), value.detach()), persistent=False)
            elif any(not isinstance(t, nn.Parameter) for t in tensors(value)):
                at = f"{path}.{name}".lstrip(".")
                text = (
                    f"{at} keeps tensors in a {type(value).__name__}, which the launcher can "
                    "neither fill with values nor move to a device"
                )
                raise RequestError((Problem("model", f"{text}; make each a buffer with register_buffer"),))
    return model


def _refuse_sparse(name: str, t: torch.Tensor) -> None:
    if t.layout is not torch.strided:
        kind = str(t.layout).removeprefix("torch.")
        text = f"{name} is {kind}, and the launcher initializes, sends and saves dense tensors only"
        text += "; register its dense parts as buffers, and build it from them in the forward"
        raise RequestError((Problem("model", text),))


def _emptied(model: nn.Module, tape: Tape) -> nn.Module:
    """Replaces the tensors of ``model`` that have values by meta tensors; the tape keeps the values."""
    twins: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, t in store.items():
                if t is None or t.is_meta:
                    continue
                if id(t) not in twins:
                    twins[id(t)] = _twin(t, tape)
                store[name] = twins[id(t)]  # type: ignore[assignment]
    return model


def _twin(t: torch.Tensor, tape: Tape) -> torch.Tensor:
    """Returns the meta tensor in place of ``t``.

    If ``t`` has hooks, the result is ``t`` itself, without its values.
    """
    twin = tape.constant(t)
    if not isinstance(t, nn.Parameter):
        return twin
    param = nn.Parameter(twin, t.requires_grad)
    if not hooks(t):
        return param
    keep(t, param)
    return t
