"""A rank's tensors as they go into a checkpoint and come back: weights, buffers, optimizer, random streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.of_plan import of_plan
from launcher.checkpoint.read import Checkpoint, each, open_checkpoint, read_extra
from launcher.checkpoint.strategy import Entry, Strategy
from launcher.parallel.broadcast import Sent, share
from launcher.parallel.local import local
from launcher.parallel.read import dtype_of, spec
from launcher.plan.params import Placed
from launcher.runtime.session import Session

RNG, RNG_CUDA = "rng.cpu", "rng.cuda"


def strategy(s: Session) -> Strategy:
    """Weights and the optimizer's state: a state tensor of its parameter's shape is laid out as the parameter is.

    Every rank calls this: what states exist is agreed on by all.
    """
    mine = {n: (p.name, k, _whole(p, t), spec(t).dtype) for n, p, k, t in _states(s)}
    every: list[Any] = [None] * s.world.size
    dist.all_gather_object(every, mine)
    placed = {p.name: p for p in s.plan.params}
    entries = dict(of_plan(s.plan).entries)
    for found in every:
        for name, (param, _, whole, dtype) in found.items():
            lay = placed[param].layout
            entries[name] = Entry(lay if whole else replace(lay, shape=(), split=()), dtype, "optim", ())
    return Strategy(s.plan.sizes.grid, entries)


def _whole(p: Placed, t: Tensor) -> bool:
    """Whether a state tensor is laid out as its parameter; else it must be a single number."""
    if tuple(t.shape) == p.spec.shape and p.spec.shape:
        return True
    assert t.numel() == 1, (
        f"{p.name}: the optimizer keeps a state of shape {tuple(t.shape)}, neither the parameter's nor a number"
    )
    return not p.spec.shape


def _states(s: Session) -> list[tuple[str, Placed, str, Tensor]]:
    """(checkpoint name, parameter, key, tensor) of every optimizer state, of each tensor's first copy on this rank."""
    out = []
    for p, t in s.model.named():
        for key, value in s.optimizer.state.get(t, {}).items():
            if isinstance(value, Tensor):
                out.append((f"optim.{key}.{p.name}", p, key, value))
    return out


def tensors(s: Session) -> dict[str, Tensor]:
    """This rank's pieces by checkpoint name. They share memory with the model."""
    out = {p.name: local(t.detach()) for p, t in s.model.named()}
    return out | {name: local(t) for name, _, _, t in _states(s)}


def blob(t: Tensor) -> Blob:
    """``t`` as bytes; no copy when it is contiguous on the CPU."""
    flat = t.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else b""
    return Blob.of(spec(flat).dtype, tuple(flat.shape), raw)


def fill(t: Tensor, b: Blob) -> None:
    """Overwrite ``t`` with the numbers of ``b``."""
    new = unpacked(b)
    assert (new.dtype, new.shape) == (t.dtype, t.shape), f"{new.dtype} {new.shape} != {t.dtype} {t.shape}"
    t.copy_(new)


def unpacked(b: Blob) -> Tensor:
    """Its numbers as a tensor of their own."""
    dtype = dtype_of(b.dtype)
    raw = torch.frombuffer(bytearray(b.data), dtype=torch.uint8) if b.data.nbytes else torch.empty(0, dtype=torch.uint8)
    return raw.view(dtype).reshape(b.shape)


def extra(s: Session) -> Mapping[str, Blob]:
    """What belongs to this rank alone, for going on bit for bit in the same layout."""
    device = torch.device(s.world.device)
    more = {RNG_CUDA: blob(torch.cuda.get_rng_state(device))} if device.type == "cuda" else {}
    return {RNG: blob(torch.get_rng_state()), **more}


@torch.no_grad()
def load(s: Session, folder: Path, broadcast: bool = False) -> Mapping[str, Any]:
    """Take weights, optimizer state, step and (in the same layout) random streams from a checkpoint of any layout.

    Returns what the checkpoint says of itself. ``broadcast``: one rank reads a piece for all that hold it; otherwise
    every rank reads what it holds.
    """
    checkpoint = open_checkpoint(folder, s.trust)
    prime(s)
    _forget(s, checkpoint.strategy)
    want = strategy(s)
    _read(s, checkpoint, want, broadcast)
    _same_copies(s)
    s.step = int(checkpoint.state["step"])
    if s.scaling.dynamic and (before := checkpoint.state.get("loss_scale")):
        s.scaling.factor, s.scaling.good = float(before[0]), int(before[1])
    if checkpoint.strategy.digest == want.digest:
        _go_on(read_extra(checkpoint, s.world.rank), torch.device(s.world.device))
    return checkpoint.state


def _read(s: Session, checkpoint: Checkpoint, want: Strategy, broadcast: bool) -> None:
    """Notes the bytes read, and those that are held afterwards, of all ranks together."""
    mine, rank = tensors(s), s.world.rank
    layouts = {name: entry.layout for name, entry in want.entries.items()}
    own = {n for n, lay in layouts.items() if not broadcast or lay.twins(rank)[0] == rank}
    both = [0, 0]
    for name, b in each(checkpoint, want, rank, only=own):
        fill(mine[name], b)
        both[0] += b.data.nbytes
    if broadcast:
        share({n: (t,) for n, t in mine.items()}, layouts)
    both[1] = sum(t.nbytes for t in mine.values())
    total = torch.tensor(both, dtype=torch.int64)
    dist.all_reduce(total)
    s.results |= dict(zip(("load_bytes_read", "load_bytes_held"), map(int, total.tolist()), strict=True))


def broadcast(s: Session) -> Sent:
    """Every replica gets the weights, buffers and optimizer state of the first rank that holds them."""
    layouts = {name: entry.layout for name, entry in strategy(s).entries.items()}
    sent = share({n: (t,) for n, t in tensors(s).items()}, layouts)
    _same_copies(s)
    return sent


def _forget(s: Session, saved: Strategy) -> None:
    """A parameter that had no optimizer state when it was saved (it never had a gradient) has none now."""
    for p, t in s.model.named():
        if not any(f"optim.{key}.{p.name}" in saved.entries for key in s.optimizer.state.get(t, {})):
            s.optimizer.state.pop(t, None)


def _go_on(own: Mapping[str, Blob], device: torch.device) -> None:
    """The random streams of this rank, where they were."""
    if RNG in own:
        torch.set_rng_state(_filled(torch.get_rng_state(), own[RNG]))
    if RNG_CUDA in own and device.type == "cuda":
        torch.cuda.set_rng_state(_filled(torch.cuda.get_rng_state(device), own[RNG_CUDA]), device)


def _filled(t: Tensor, b: Blob) -> Tensor:
    fill(t, b)
    return t


def _same_copies(s: Session) -> None:
    """A second copy of a tensor on this rank gets the first one's numbers and optimizer state."""
    first = {p.name: t for p, t in s.model.named()}
    for name, t in s.model.trainable():
        origin = first[name.split("@")[0]]
        if origin is not t:
            local(t.detach()).copy_(local(origin.detach()))
            if origin not in s.optimizer.state:
                s.optimizer.state.pop(t, None)
            for key, value in s.optimizer.state.get(origin, {}).items():
                if isinstance(value, Tensor):
                    local(s.optimizer.state[t][key]).copy_(local(value))


def prime(s: Session) -> None:
    """Make the optimizer create its state without moving any weight: one step with a rate and gradients of zero."""
    if s.optimizer.state:
        return
    kept = {t: local(t.detach()).clone() for _, t in s.model.trainable()}
    rates = [g["lr"] for g in s.optimizer.param_groups]
    for g in s.optimizer.param_groups:
        g["lr"] = 0.0
    for t in kept:
        t.grad = torch.zeros_like(t)
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=True)
    for g, lr in zip(s.optimizer.param_groups, rates, strict=True):
        g["lr"] = lr
    for t, value in kept.items():
        local(t.detach()).copy_(value)
