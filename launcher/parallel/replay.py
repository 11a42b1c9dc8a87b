"""Makes one tensor of a model alone, out of the recorded operations that its numbers come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from launcher.parallel.mode import default_dtype


class NotReplayable(ValueError):
    """A tensor whose numbers no recorded operation makes. The message names it and says why."""


@dataclass(frozen=True)
class Op:
    """``func(*args, **kwargs)``, with the storages it reads and changes and the tensors it makes."""

    func: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[torch.Tensor, ...]
    random: bool


@dataclass
class Log:
    """Operations in order, and the places of those that made or changed each storage. ``dtype`` was the default one."""

    dtype: torch.dtype
    ops: list[Op] = field(default_factory=list)
    touched: dict[int, list[int]] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        for at in op.writes | set(map(key, op.makes)):
            self.touched.setdefault(at, []).append(len(self.ops))
        self.ops.append(op)

    def forget(self, storage: int) -> None:
        """What was done to ``storage`` so far does not count."""
        for at in self.touched.pop(storage, []):
            self.ops[at] = Op(lambda: None, (), {}, frozenset(), frozenset(), (), random=False)

    def known(self) -> set[int]:
        """Storages whose numbers can be made again."""
        good: set[int] = set()
        for op in self.ops:
            if op.reads <= good:
                good |= set(map(key, op.makes))
            else:
                good -= op.writes
        return good

    def origin(self, storage: int, name: str) -> list[int]:
        """The places of the operations that the numbers in ``storage`` come from, in order."""
        chosen: set[int] = set()
        seen, todo = {storage}, [storage]
        while todo:
            at = todo.pop()
            if at not in self.touched:
                raise NotReplayable(f"{name}: its numbers do not come from operations of the constructor")
            for place in set(self.touched[at]) - chosen:
                chosen.add(place)
                todo += self.ops[place].reads - seen
                seen |= self.ops[place].reads
        return sorted(chosen)


def key(t: torch.Tensor) -> int:
    """The storage behind ``t``."""
    return int(t.untyped_storage()._cdata)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``tree``."""
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def stream(seed: int, name: str) -> int:
    """The seed of a random stream of its own: 63 bits of blake2b."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def replay(log: Log, target: torch.Tensor, name: str, seed: int | None) -> torch.Tensor:
    """``target`` with its numbers, whole, on the CPU.

    Every random operation has a stream of its own, so two tensors made from one draw agree. Raises ``NotReplayable``,
    also for a random one when ``seed`` is ``None``.
    """
    real: dict[int, torch.Tensor] = {}

    def there(t: torch.Tensor) -> torch.Tensor:
        at = real.get(key(t))
        return t if at is None else at.as_strided(t.shape, t.stride(), t.storage_offset())

    with default_dtype(log.dtype), torch.random.fork_rng(devices=[]), torch.no_grad():
        for place in log.origin(key(target), name):
            op = log.ops[place]
            if op.random:
                if seed is None:
                    raise NotReplayable(f"{name}: the constructor looks at random numbers")
                torch.manual_seed(stream(seed, str(place)))
            args, kwargs = tree_map_only(torch.Tensor, there, (op.args, op.kwargs))
            out = op.func(*args, **{k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()})
            for made, t in zip(op.makes, [t for t in tensors(out) if op.makes], strict=False):
                real[key(made)] = t
        return there(target.detach())
