"""The tape of a constructor that runs on meta tensors: its operations, and the values that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import nn

from launcher.parallel.deferred_init.random_streams import Draw, Streams
from launcher.parallel.deferred_init.replay import NotReplayable, Op, OpLog, key, replay, start, tensors
from launcher.parallel.dispatch.modes import Dispatch, tree_leaves, tree_map_only
from launcher.parallel.model_state.module_globals import files_of, named_variables
from launcher.plan.values.model_graph import ForeignMemory

aten = torch.ops.aten

BLANK = (
    "empty",
    "empty_strided",
    "empty_like",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
)
FILLS = (
    "fill_",
    "zero_",
    "copy_",
    "uniform_",
    "normal_",
    "random_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
)
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
STATISTICS = ("running_mean", "running_var")
"""Arguments that ``BATCH_NORMS`` write in training, although their schemas do not say so."""
META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass
class ConstantTensor:
    """Values that no operation made.

    ``sum`` is a checksum: it shows whether code outside torch has changed them since.
    """

    value: torch.Tensor
    sum: int = 0

    def __call__(self) -> torch.Tensor:
        return self.value.clone()

    def checksum(self) -> int:
        flat = self.value.contiguous().reshape(-1).view(torch.uint8)
        return crc32(memoryview(flat.numpy()))  # type: ignore[arg-type]

    def own(self) -> None:
        """Keeps a copy of the values, because an operation is about to change them."""
        self.value = self.value.clone()


class Tape(Dispatch):
    """Records a constructor that runs while the tape is entered.

    ``why`` is the reason if the constructor cannot be recorded; the tape is useless then. ``off`` has the
    storages of tensors that the constructor itself puts on the meta device; ``meta_requested`` is true while
    it does so. ``past`` has the tapes of earlier constructions, which may have left tensors in a cache.
    ``shared``, ``computed``, ``foreign_memory`` and ``marks`` are results of ``model_state.references``.
    """

    past: ClassVar[list[Tape]] = []

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = OpLog()
        # arrays of numpy, and the keys of the tensors that share their memory
        self.shown: list[tuple[Any, int]] = []
        # tensors that are made of other memory, such as an array's, and the keys of what replaces them
        self.given: list[tuple[torch.Tensor, int]] = []
        self.seed = seed
        self.why = ""

        # about the tensors that it has made
        self.off: set[int] = set()
        self.shared: tuple[tuple[str, ...], ...] = ()
        self.computed: tuple[str, ...] = ()
        self.foreign_memory: tuple[ForeignMemory, ...] = ()
        self.marks: dict[str, tuple[str, ...]] = {}

        # while it runs
        self.meta_requested = False
        self._pause = 0
        self._streams = Streams(seed)
        self._lent: dict[int, list[ConstantTensor]] = {}
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pause:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, dict(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs code that is not part of the constructor."""
        self._pause += 1
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._pause -= 1

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        real = [t for t in tensors((args, kwargs)) if not t.is_meta]
        if func is aten._local_scalar_dense.default:
            return self.look(args[0]).item()
        if func is aten.lift_fresh.default and real:
            return self.constant(args[0])
        if real and self._on_numbers(func, args, kwargs):
            return self._run(func, args, kwargs)

        # operations that run on the meta device and are recorded
        args, kwargs = tree_map_only(torch.Tensor, self._known, (args, kwargs))
        away = self._placed(func, args, kwargs)
        draw, args, kwargs = self._drawn(func, args, kwargs, away)
        in_place = _random(func) and name_of(func).endswith("_")  # a meta tensor has no memory to fill
        try:
            out = args[0] if in_place else func(*args, **kwargs)
        except NotImplementedError:
            return self._by_numbers(func, args, kwargs, draw)
        self._record(func, args, kwargs, out, draw=draw)
        if away:
            self.off |= {key(t) for t in tensors(out)}
        return out

    def _known(self, t: torch.Tensor) -> torch.Tensor:
        """Returns ``t``, or the meta tensor in place of it if it has values."""
        if not t.is_meta:
            return self.constant(t)
        if key(t) not in self.log.touched and key(t) not in self.off:
            self.remember(t)
            if key(t) not in self.log.touched and t.numel():
                self.fail("uses a tensor that no operation of the constructor made")
        return t

    def remember(self, t: torch.Tensor) -> None:
        """Records the values of a tensor that an earlier construction made, if one did."""
        value = remembered(t)
        if value is not None:
            self.log.add(Op(ConstantTensor(value), makes=(t.detach(),)))

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, draw: Draw | None) -> None:
        if func is aten._to_copy.default and args[0].dtype == out.dtype:  # the CPU's tensor would be the same
            self.given += [(value, key(out)) for value, at in self.given if at == key(args[0])]

        # the storages that it reads and those that it writes, in full or in part
        ins = {key(t) for t in tensors((args, kwargs))}
        written = _written(func, args, kwargs)
        if self._seen & {key(t) for t in written}:
            self.fail("changes a tensor after numpy has seen it")

        # the writes that fill a storage, and the reads for which only the shape counts
        others = {key(t) for t in tensors((args, kwargs)) if all(t is not w for w in written)}
        name = name_of(func)
        makes = tuple(None if key(t) in ins else t.detach() for t in tensors(out))  # its shape may change
        fills = {key(t) for t in written if name in FILLS and _covers_storage(t)} - others
        like = others if name.endswith("_like") or name.startswith("new_") else set[int]()

        # detached: a tape must keep no autograd graph, nor follow a Parameter that is swapped for another
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach(), (args, kwargs))
        op = Op(
            func=func,
            args=args,
            kwargs=kwargs,
            reads=frozenset(ins - fills - like),
            shapes=frozenset(fills | like),
            writes=frozenset(map(key, written)),
            fills=frozenset(fills),
            makes=makes if any(t is not None for t in makes) else (),
            draw=draw,
            blank=name in BLANK,
        )
        self.log.add(op)

    def _placed(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns true if the result is on the meta device for the constructor too; changes ``kwargs``."""
        device = kwargs.get("device")
        gone = any(key(t) in self.off for t in tensors((args, kwargs)))
        takes_device = any(name == "device" for name, _ in _arguments(func))
        if not takes_device or (device is None and tensors(args)):
            return gone

        # the call names a device
        device = CPU if device is None else torch.device(device)
        if device.type not in ("cpu", "meta"):
            self.fail(f"puts tensors on {device}")
        kwargs["device"] = META
        name = name_of(func)
        if gone and device.type == "cpu" and not name.endswith("_like") and "new_" not in name:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        return device.type == "meta" and (self.meta_requested or gone)

    def _drawn(self, func: Any, args: Any, kwargs: Any, away: bool = False) -> tuple[Draw | None, Any, Any]:
        """Returns the draw of a random operation, and its arguments without the generator.

        The draw has the generator's state. On the meta device (``away``) nothing is drawn.
        """
        if not _random(func):
            return None, args, kwargs
        used = [g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
        if any(g.device.type != "cpu" for g in used):
            self.fail(f"draws from a generator of {used[0].device}")
        args, kwargs = tree_map_only(torch.Generator, lambda g: None, (args, kwargs))
        if away:
            return None, args, kwargs
        return self._streams.draw(used[0] if used else None), args, kwargs

    def _on_numbers(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns true if an operation runs on real tensors: all of its tensors are, or it changes one."""
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            return False
        changes = any(not t.is_meta for t in _written(func, args, kwargs))
        return changes or all(not t.is_meta for t in tensors((args, kwargs)))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation on real tensors, with the values of its meta tensors in their place."""
        for t in _written(func, args, kwargs):
            for constant in self._lent.pop(key(t), ()):
                constant.own()
        draw, args, kwargs = self._drawn(func, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: self.look(t) if t.is_meta else t, (args, kwargs))
        return self._really(func, args, kwargs, draw)

    def _really(self, func: Any, args: Any, kwargs: Any, draw: Draw | None) -> Any:
        if draw is None:
            return func(*args, **kwargs)
        before = torch.default_generator.get_state()
        start(self.log, draw, self.seed)
        out = func(*args, **kwargs)
        if draw.root:
            draw.root.states[draw.at + 1] = torch.default_generator.get_state()
        torch.default_generator.set_state(before)
        return out

    def _by_numbers(self, func: Any, args: Any, kwargs: Any, draw: Draw | None) -> Any:
        """Runs an operation that the meta device does not support, on real values."""
        arguments = tensors((args, kwargs))
        real: dict[int, torch.Tensor] = {id(t): self.look(t) for t in arguments}
        looked, named = tree_map_only(torch.Tensor, lambda t: real[id(t)], (args, kwargs))
        if "device" in named:
            named["device"] = CPU
        out = self._really(func, looked, named, draw)

        # back to meta: the tensors that it changed, and its results
        for t in _written(func, args, kwargs):
            self._dispatch(aten.copy_.default, (t, self.constant(real[id(t)])), {})
        back = {id(real[id(t)]): t for t in arguments}
        return tree_map_only(torch.Tensor, lambda t: back[id(t)] if id(t) in back else self.constant(t), out)

    def one(self, func: Callable[..., Any], target: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Records ``func(target, *args)``, which fills ``target`` with random values, as one operation."""
        with self.paused():
            self._one(func, target, args, kwargs)

    def _one(self, func: Callable[..., Any], target: torch.Tensor, args: Any, kwargs: Any) -> None:
        draw, args, kwargs = self._drawn(func, args, kwargs, key(target) in self.off)
        if not target.is_meta:
            self._really(func, (target, *args), kwargs, draw)
            return

        # a view keeps the values around it
        at = frozenset({key(target)})
        covered = at if _covers_storage(target) else frozenset()
        op = Op(
            func=func,
            args=(target.detach(), *args),
            kwargs=kwargs,
            reads=at - covered,
            shapes=covered,
            writes=at,
            fills=covered,
            draw=draw,
        )
        self.log.add(op)

    def constant(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a meta tensor in place of ``value``, whose values are known."""
        constant = ConstantTensor(value.detach())
        constant.sum = constant.checksum()
        self._lent.setdefault(key(value), []).append(constant)
        meta = torch.empty_like(value, device="meta", requires_grad=False)
        with self.paused():
            made = meta.detach()  # ``meta.data = ...`` may give the tensor itself another dtype
        self.given.append((constant.value, key(meta)))
        self.log.add(Op(constant, makes=(made,)))
        return meta

    def look(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the values that ``t`` has now, for a constructor that reads them."""
        with self.paused():
            return t if not t.is_meta else replay(self.log, t, "a value", self.seed)

    def show(self, t: torch.Tensor) -> Any:
        """Returns ``t`` as a read-only numpy array; later changes of ``t`` fail the tape."""
        self._seen.add(key(t))
        array = self.look(t).numpy()
        array.flags.writeable = False
        self.shown.append((array, key(t)))
        return array

    def fail(self, why: str) -> None:
        """Sets ``why`` and raises ``NotReplayable``; ``why`` stays if the constructor catches the error."""
        self.why = self.why or why
        raise NotReplayable(why)

    def finish(self, model: nn.Module) -> None:
        """Checks after the constructor that all tensors are known and no array was changed outside torch."""
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            self._known(t)
            if key(t) not in self.log.touched and key(t) not in self.off:
                self.fail(f"takes {name} from somewhere else")
        self._advance_generators(model)
        if any(constant.sum != constant.checksum() for lent in self._lent.values() for constant in lent):
            self.fail("changes an array after a tensor was made of it")

    def _advance_generators(self, model: nn.Module) -> None:
        """Gives generators of the model and its files the states that they have after the draws themselves.

        A forward may go on drawing from them.
        """
        if not self._streams.has_own:
            return
        values = [v for m in model.modules() for v in vars(m).values()]
        values += [v for _, v in named_variables(files_of(model))]
        for generator in (v for v in values if isinstance(v, torch.Generator)):
            draw = self._streams.next_of(generator)
            if draw is not None and draw.root is not None:
                with torch.random.fork_rng(devices=[]), self.paused():
                    start(self.log, draw, self.seed)
                    generator.set_state(torch.default_generator.get_state())


class PlainDraws(Tape):
    """Gives each draw of a construction in memory the values of the same draw in a recording."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._pause or not _random(func):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            device = kwargs.get("device")
            away = any(t.is_meta for t in tensors((args, kwargs)))
            away |= device is not None and torch.device(device).type == "meta"
            draw, args, kwargs = self._drawn(func, args, kwargs, away)
            return self._really(func, args, kwargs, draw)


def remembered(t: torch.Tensor) -> torch.Tensor | None:
    """Returns the values of a meta tensor that an earlier construction made, or ``None``."""
    for tape in reversed(Tape.past):
        if key(t) in tape.log.touched and key(t) not in tape.off and _covers_storage(t):
            return tape.look(t)
    return None


def name_of(func: Any) -> str:
    return str(func._schema.name.rpartition("::")[2]) if hasattr(func, "_schema") else ""


def _random(func: Any) -> bool:
    """Returns true if ``func`` is random; a function of several operations has no tags, so it counts too."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", (torch.Tag.nondeterministic_seeded,))


def _covers_storage(t: torch.Tensor) -> bool:
    """Returns true if ``t`` covers every byte of its storage, each once."""
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != size:
            return False
        size *= n
    return t.numel() * t.element_size() == t.untyped_storage().nbytes()


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """Returns each argument of the schema, and whether it is written.

    The result is cached, because torch rebuilds the arguments on each access.
    """
    unsaid = STATISTICS if name_of(func) in BATCH_NORMS else ()
    infos = ((a.name, a.alias_info) for a in func._schema.arguments)
    return tuple((n, n in unsaid or (info is not None and info.is_write)) for n, info in infos)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors that an operation changes."""
    out = []
    for n, (name, write) in enumerate(_arguments(func)):
        if write:
            out += tensors(args[n] if n < len(args) else kwargs.get(name))
    return out
