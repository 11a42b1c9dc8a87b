"""Records how a model's constructor makes its tensors, so that any one of them can be made again, alone.

A constructor run on the meta device leaves shapes but no numbers. The tape keeps every operation it did; ``replay``
repeats, in real memory, just those that one tensor needs, with random streams derived from the seed and the place of
the operation: a tensor has the same numbers whichever rank makes it, in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from launcher.errors import Problem, RequestError
from launcher.parallel.hooks import hooks, keep
from launcher.parallel.replay import Log, NotReplayable, Op, key, replay, stream, tensors

READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


class Tape(TorchDispatchMode):
    """Enter it around a constructor that runs on the meta device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in ``cost``: spares the import of torch._dynamo."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.log = Log(torch.get_default_dtype())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.look(args[0]).item()
        random = torch.Tag.nondeterministic_seeded in func.tags
        drawn = random and func._schema.name.endswith("_")  # in place, where a meta tensor has nothing to fill
        out = args[0] if drawn else func(*args, **kwargs)
        outs, ins = tensors(out), tensors((args, kwargs))
        changed = {key(t) for a, t in _bound(func, args, kwargs) if a.alias_info is not None and a.alias_info.is_write}
        fresh = tuple(t for t in outs if key(t) not in {key(i) for i in ins})
        # detached: a tape must not keep an autograd graph, nor follow a Parameter that is later swapped for another
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach(), (args, kwargs))
        args, kwargs = tree_map_only(torch.Generator, lambda g: None, (args, kwargs))  # its state is not ours to keep
        self.log.add(Op(func, args, kwargs, frozenset(map(key, ins)), frozenset(changed), fresh, random))
        return out

    def one(self, func: Callable[..., Any], target: torch.Tensor, args: Any, kwargs: Any) -> None:
        """``func(target, *args)`` fills ``target`` in place with random numbers."""
        at = frozenset({key(target)})
        args, kwargs = tree_map_only(torch.Generator, lambda g: None, (args, kwargs))
        self.log.add(Op(func, (target.detach(), *args), kwargs, at, at, (), random=True))

    def constant(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """``meta`` stands for ``value``, whose numbers are known."""
        self.log.forget(key(meta))  # the copy to meta, which has lost the numbers
        self.log.add(Op(lambda: value.clone(), (), {}, frozenset(), frozenset(), (meta,), random=False))

    def look(self, t: torch.Tensor) -> torch.Tensor:
        """The numbers of ``t`` now: the constructor wants to see them. Raises ``NotReplayable`` if they are random."""
        with torch.utils._python_dispatch._disable_current_modes():
            return replay(self.log, t, "a value", None)


def _bound(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, torch.Tensor]]:
    """Each schema argument with each tensor given for it."""
    for at, a in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(a.name)
        for t in tensors(value):
            yield a, t


class _Plainly(TorchFunctionMode):
    """Keeps data written in the constructor (``torch.tensor([1.0])``), and hides that nothing is real.

    ``nn.init.orthogonal_`` for one returns at once when it sees a meta tensor.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cpu":
            kwargs["device"] = "meta"
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in READS and args[0].is_meta:
            return func(self.tape.look(args[0]), *args[1:], **kwargs)
        if func in LITERALS and not tensors((args, kwargs)):
            value = func(*args, **(kwargs if func is torch.from_numpy else kwargs | {"device": "cpu"}))
            meta = value.to("meta")
            self.tape.constant(meta, value)
            return meta
        return func(*args, **kwargs)


@contextmanager
def _truncated(tape: Tape) -> Iterator[None]:
    """``nn.init.trunc_normal_`` draws again until all numbers fit, which needs the numbers: taped as one operation."""
    real = nn.init._no_grad_trunc_normal_

    def taped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tape.one(real, tensor, args, kwargs)
        return tensor

    nn.init._no_grad_trunc_normal_ = taped
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = real


def record(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Tape]:
    """Build on the meta device with a tape running. The model's tensors are meta tensors.

    A constructor that cannot run without numbers runs with them (``really``), and leaves an empty tape.
    """
    tape = Tape()
    try:
        with torch.device("meta"), tape, _Plainly(tape), _truncated(tape):
            model = build()
    except (NotReplayable, NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotReplayable) and "meta" not in str(error).lower():
            raise
        model, tape = really(build, seed), Tape()
    return _emptied(owned(model), tape), tape


def really(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model with its numbers, all of it, in memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, ""))
        return owned(build())


def unknown(model: nn.Module, tape: Tape) -> list[str]:
    """Names of tensors the tape cannot make again: made out of data it never saw, or outside the constructor."""
    good = tape.log.known()
    return [n for n, t in (*model.named_parameters(), *model.named_buffers()) if key(t) not in good]


def owned(model: nn.Module) -> nn.Module:
    """Tensors kept as plain attributes become buffers outside the state dict: so they get numbers and a device.

    Raises ``RequestError`` for tensors that cannot be placed.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(t):
            text = f"{name} has no shape before the first forward; give its module the size of its input"
            raise RequestError((Problem("model", text),))
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in vars(nn.Module()) or isinstance(value, nn.Parameter):
                continue
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value.detach(), persistent=False)
            elif any(not isinstance(t, nn.Parameter) for t in tensors(value)):
                at = f"{path}.{name}".lstrip(".")
                text = f"{at} keeps tensors in a {type(value).__name__}, where no device can be given to them"
                raise RequestError((Problem("model", f"{text}; make each a buffer with register_buffer"),))
    return model


def _emptied(model: nn.Module, tape: Tape) -> nn.Module:
    """``model`` with meta tensors for those that the constructor put on the CPU by name."""
    twins: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, t in store.items():
                if t is not None and not t.is_meta:
                    if id(t) not in twins:
                        twins[id(t)] = twin = t.detach().to("meta")
                        if isinstance(t, nn.Parameter):
                            twins[id(t)] = nn.Parameter(twin, t.requires_grad)
                        tape.log.add(Op(_as_it_is, (t.detach(),), {}, frozenset({key(t)}), frozenset(), (twin,), False))
                        if isinstance(t, nn.Parameter) and hooks(t):
                            keep(t, twins[id(t)])  # type: ignore[arg-type]
                            twins[id(t)] = t
                    store[name] = twins[id(t)]  # type: ignore[assignment]
    return model


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t
