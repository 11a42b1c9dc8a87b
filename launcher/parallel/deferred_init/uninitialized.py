"""Finds tensors that a constructor leaves to chance: uninitialised memory, and numbers that no seed decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from launcher.errors import Problem
from launcher.parallel.deferred_init.operation_tape import BLANK, ConstantTensor, Tape, name_of
from launcher.parallel.deferred_init.record import build_in_memory, record
from launcher.parallel.deferred_init.replay import Log, key, replay
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves

Build = Callable[[], nn.Module]
FILLS = (0x41, 0x42)  # as bytes of a float of any width neither tiny nor huge


def problems(build: Build, model: nn.Module, tape: Tape) -> list[Problem]:
    """What is wrong with the numbers of ``model``, which ``record`` made with ``build`` and ``tape``."""
    if tape.why:
        return _whole(build, tape.seed)
    bare = [n for n, t in _named(model) if key(t) in tape.off]
    blank = [n for n, t in _named(model) if n not in bare and _unwritten(tape, n, t)]
    loose = [] if bare or blank else _unlike(build, model, tape)
    return [*map(_bare, bare), *map(_blank, blank), *map(_loose, loose)]


def _whole(build: Build, seed: int) -> list[Problem]:
    """The same for a model that no tape can record, from three constructions."""
    first, again, other = (_digests(build, seed, fill) for fill in (FILLS[0], *FILLS))
    bare = [n for n, digest in first.items() if not digest]
    loose = [n for n in first if first[n] != again.get(n)]
    blank = [n for n in first if n not in loose and first[n] != other.get(n)]
    return [*map(_bare, bare), *map(_blank, blank), *map(_loose, loose)]


def _blank(name: str) -> Problem:
    how = "the constructor makes it with torch.empty, or the like, and leaves it so"
    return Problem("model", f"{name} is memory that nobody wrote: {how}; initialise it in the constructor")


def _loose(name: str) -> Problem:
    text = f"{name} has other numbers each time the constructor runs, although torch, random and numpy are seeded"
    return Problem("model", f"{text}; seed what they come from, or keep nothing between two constructions")


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _bare(name: str) -> Problem:
    text = f"{name} is on the meta device, where it has no numbers"
    return Problem("model", f"{text}; initialise it in the constructor")


def _unwritten(tape: Tape, name: str, t: torch.Tensor) -> bool:
    """Whether ``t`` is other when unwritten memory is."""
    if t.numel() == 0 or key(t) not in tape.log.doubtful():
        return False
    try:
        one, two = (replay(tape.log, t, name, tape.seed, fill) for fill in FILLS)
    except (RuntimeError, IndexError):  # an index that nobody wrote
        return True
    return _bytes(one) != _bytes(two)


def _bytes(t: torch.Tensor) -> bytes:
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


class _Filled(Dispatch):
    """Memory that nobody wrote yet has ``fill`` in every byte."""

    def __init__(self, fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if name_of(func) in BLANK and isinstance(out, torch.Tensor) and out.device.type == "cpu":
            out.untyped_storage().fill_(self.fill)  # type: ignore[attr-defined]
        return out


def _digests(build: Build, seed: int, fill: int) -> dict[str, bytes]:
    with _Filled(fill):
        model = build_in_memory(build, seed)
    return {n: b"" if t.is_meta else _bytes(t) for n, t in _named(model)}


def _unlike(build: Build, model: nn.Module, tape: Tape) -> list[str]:
    """Names of tensors that a second construction makes in another way."""
    other, again = record(build, tape.seed)
    first, second = (origins(dict(_named(m)), t) for m, t in ((model, tape), (other, again)))
    return [
        n
        for n in {**first, **second}
        if first.get(n) != second.get(n) and not _same(n, (model, tape), (other, again))
    ]


def _same(name: str, *builds: tuple[nn.Module, Tape]) -> bool:
    """Whether two constructions come to the same numbers in different ways: one finds a cache that the other filled."""
    named = [(dict(_named(model)).get(name), tape) for model, tape in builds]
    return (
        len({_bytes(replay(tape.log, t, name, tape.seed)) if t is not None else b"" for t, tape in named})
        == 1
    )


def origins(tensors: Mapping[str, torch.Tensor], tape: Tape) -> dict[str, str]:
    """How each tensor is made, without a trace of where in memory: by name."""
    texts = _texts(tape.log)
    named = ((n, t, tape.log.touched.get(key(t), [])) for n, t in tensors.items())
    return {
        n: f"{tuple(t.shape)} {t.dtype} {t.stride()} {[texts[p] for p in places]}" for n, t, places in named
    }


def _texts(log: Log) -> list[str]:
    """A digest of each operation and of those that it needs."""
    texts: list[str] = []
    for place, op in enumerate(log.ops):
        storages = sorted(op.reads, key=lambda s: log.touched.get(s, [0])[0])
        before = [texts[p] for s in storages for p in log.touched.get(s, []) if p < place]
        text = f"{_text(op.func)} {[_text(a) for a in tree_leaves((op.args, op.kwargs))]} {op.draw and op.draw.at}"
        if op.draw and op.draw.root:
            text += str(_bytes(op.draw.root.states[0]))
        texts.append(hashlib.blake2b(f"{text} {before}".encode(), digest_size=16).hexdigest())
    return texts


def _text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.stride()} {leaf.storage_offset()} {leaf.dtype}"
    if isinstance(leaf, ConstantTensor):
        return str(_bytes(leaf.value))
    return getattr(leaf, "__name__", "") or str(leaf)
