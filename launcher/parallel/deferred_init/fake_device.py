"""Makes meta tensors report the CPU as their device, so that a constructor runs as in a plain build."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from launcher.parallel.deferred_init.replay import key, tensors
from launcher.parallel.dispatch.pytree import tree_map_only

if TYPE_CHECKING:
    from launcher.parallel.deferred_init.operation_tape import Tape

T = torch.Tensor
MEMORY = (
    T.data_ptr, T.untyped_storage, T.storage, T.share_memory_, T.pin_memory, T.__dlpack__, T.__reduce_ex__,
)  # fmt: skip


def _getter(name: str) -> Any:
    return getattr(T, name).__get__


def _asks_meta(func: Any, kwargs: Any) -> bool:
    """Whether the caller wants a new tensor on the meta device, by argument or by context."""
    asked = kwargs.get("device")
    if asked is None and func in _device._device_constructors():
        asked = getattr(_device, "CURRENT_DEVICE", None)
    return asked is not None and torch.device(asked).type == "meta"


def _places(at: Any) -> Any:
    """Return an index with a tensor in place of each list or array of numbers."""
    if isinstance(at, tuple):
        return tuple(map(_places, at))
    if isinstance(at, np.ndarray):
        return torch.as_tensor(at)
    numbers = isinstance(at, list) and not any(isinstance(a, slice | T | type(None)) for a in at)
    return torch.tensor(at) if numbers and at and at is not Ellipsis else at


class FakeDevice(TorchFunctionMode):
    """Answers for meta tensors what they would say on the CPU; fails the tape if it cannot know."""

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

        # the constructor itself asks for a tensor on the meta device
        self.tape.asked_meta = _asks_meta(func, kwargs)
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
            self.tape.asked_meta = False

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that reads values inside (``torch.allclose``), and return its result."""
        args, kwargs = tree_map_only(T, self.tape.look, (args, kwargs))
        with self.tape.paused():
            out = func(*args, **kwargs)
        if tensors(out):
            self.tape.fail(f"calls {func.__name__}, which looks at numbers inside")
        return out

    def _ours(self, t: torch.Tensor, func: Any) -> bool:
        return func == T.data.__set__ or (t.is_meta and key(t) not in self.tape.off)  # type: ignore[attr-defined]

    def _memory(self, func: Any) -> Callable[..., Any]:
        return lambda *_, **__: self.tape.fail(f"calls Tensor.{func.__name__}, which needs its memory")

    def _type(self, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = t.type(*args, **kwargs)
        return out.replace("meta.", "") if isinstance(out, str) else out

    def _to(self, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor itself for ``to("cpu")``, as for a tensor that is there."""
        asked = [a for a in (*args[:1], kwargs.get("device")) if isinstance(a, str | torch.device)]
        if any(torch.device(a).type == "meta" for a in asked):
            self.tape.fail("moves a tensor to the meta device")

        # the CPU is the meta device here; the first argument may be a dtype, or a tensor to copy the device
        # from
        if asked and torch.device(asked[0]).type == "cpu":
            meta = torch.device("meta")
            args = tuple(meta if a is asked[0] else a for a in args)
            if "device" in kwargs:
                kwargs = kwargs | {"device": meta}
        return t.to(*args, **kwargs)

    def _new(self, t: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        """Run ``new_tensor``, which on the meta device would drop the values."""
        kwargs = {"dtype": t.dtype} | {k: v for k, v in kwargs.items() if v is not None and k != "device"}
        if isinstance(data, T):
            data = data.detach().tolist()
        return torch.tensor(data, **kwargs)

    def _data(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Assign ``t.data``: the new values move to the device of ``t``."""
        if t.is_meta and not value.is_meta:
            value = self.tape.constant(value)
        elif value.is_meta and not t.is_meta:
            value = self.tape.look(value)
        t.data = value
