"""Finds tensors that a constructor leaves undefined: uninitialized memory, values that no seed determines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from launcher.errors import Problem
from launcher.parallel.deferred_init.constructor import build_in_memory, record
from launcher.parallel.deferred_init.replay import OpLog, key, replay
from launcher.parallel.deferred_init.tape import BLANK, ConstantTensor, Tape, name_of
from launcher.parallel.dispatch.modes import Dispatch, tree_leaves

Build = Callable[[], nn.Module]
FILLS = (0x41, 0x42)  # a float of these bytes is neither tiny nor huge, at any width


def problems(build: Build, model: nn.Module, tape: Tape) -> list[Problem]:
    """Returns the undefined tensors of ``model``, which ``record`` made from ``build``, with its ``tape``."""
    if tape.why:
        return _construction_problems(build, tape.seed)
    bare = [n for n, t in _named(model) if key(t) in tape.off]
    blank = [n for n, t in _named(model) if n not in bare and _unwritten(tape, n, t)]
    loose = [] if bare or blank else _unlike(build, model, tape)
    return [*map(_bare, bare), *map(_blank, blank), *map(_loose, loose)]


def _construction_problems(build: Build, seed: int) -> list[Problem]:
    """Returns the problems of a model that no tape can record, from three constructions."""
    first, again, other = (_digests(build, seed, fill) for fill in (FILLS[0], *FILLS))
    bare = [n for n, digest in first.items() if not digest]
    loose = [n for n in first if first[n] != again.get(n)]
    blank = [n for n in first if n not in loose and first[n] != other.get(n)]
    return [*map(_bare, bare), *map(_blank, blank), *map(_loose, loose)]


def _blank(name: str) -> Problem:
    how = "the constructor makes it with torch.empty or a similar function and does not fill it"
    return Problem("model", f"{name} is uninitialized memory: {how}; initialize it in the constructor")


def _loose(name: str) -> Problem:
    text = f"{name} gets different values each time the constructor runs"
    cure = "seed their source, or keep no state between two constructions"
    return Problem("model", f"{text}, although torch, random and numpy are seeded; {cure}")


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _bare(name: str) -> Problem:
    text = f"{name} is on the meta device, where it has no values"
    return Problem("model", f"{text}; initialize it in the constructor")


def _unwritten(tape: Tape, name: str, t: torch.Tensor) -> bool:
    """Returns true if ``t`` depends on the content of unwritten memory."""
    if t.numel() == 0 or key(t) not in tape.log.doubtful():
        return False
    try:
        one, two = (replay(tape.log, t, name, tape.seed, fill=fill) for fill in FILLS)
    except (RuntimeError, IndexError):  # an unwritten value is used as an index
        return True
    return _bytes(one) != _bytes(two)


def _bytes(t: torch.Tensor) -> bytes:
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


class _Filled(Dispatch):
    """Fills newly allocated memory with ``fill`` in every byte."""

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
    """Returns the names of tensors to which a second construction gives other values."""
    builds = ((model, tape), record(build, tape.seed))
    first, second = (origins(dict(_named(m)), t) for m, t in builds)
    differ = [n for n in {**first, **second} if first.get(n) != second.get(n)]
    return [n for n in differ if len({_numbers(n, m, t) for m, t in builds}) > 1]


def _numbers(name: str, model: nn.Module, tape: Tape) -> bytes:
    """Returns a digest of a tensor's values.

    A construction that reads the cache of an earlier one records other operations, but must get equal values.
    """
    t = dict(_named(model)).get(name)
    return b"" if t is None else _bytes(replay(tape.log, t, name, tape.seed))


def origins(tensors: Mapping[str, torch.Tensor], tape: Tape) -> dict[str, str]:
    """Describes by name how each tensor is made, without addresses in memory."""
    texts = _texts(tape.log)
    out = {}
    for name, t in tensors.items():
        made = [texts[place] for place in tape.log.touched.get(key(t), [])]
        out[name] = f"{tuple(t.shape)} {t.dtype} {t.stride()} {made}"
    return out


def _texts(log: OpLog) -> list[str]:
    """Returns a digest of each operation and of those that it needs."""
    texts: list[str] = []
    for place, op in enumerate(log.ops):
        storages = sorted(op.reads, key=lambda s: log.touched.get(s, [0])[0])
        before = [texts[p] for s in storages for p in log.touched.get(s, []) if p < place]
        arguments = [_text(a) for a in tree_leaves((op.args, op.kwargs))]
        text = f"{_text(op.func)} {arguments} {op.draw and op.draw.at}"
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
