"""Moves a rank's tensors to a checkpoint and back: weights, buffers, optimizer and random states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.checkpoint.layout.derive_strategy import (
    strategy_of_plan,
    strategy_to_load,
    with_left_out_tensors,
)
from launcher.checkpoint.layout.strategy import KINDS, Entry, Kind, Strategy
from launcher.checkpoint.read import Checkpoint, each, open_checkpoint, read_extra
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.optim.state_packing import on_device, pack, unpack
from launcher.parallel.broadcast import Sent, share
from launcher.parallel.local_tensors import local
from launcher.parallel.trace.tensor_specs import dtype_of, spec
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.resolve.checkpoint import AVERAGE, STREAM
from launcher.plan.values.layout import Layout
from launcher.plan.values.optimizer import factor_layout
from launcher.runtime import device as devices
from launcher.runtime.cluster.messages import all_gather
from launcher.runtime.training import module_state
from launcher.runtime.training.module_state import restore_module_state
from launcher.runtime.training.session import Session

Described = tuple[str, str, tuple[int, ...] | None, str]


@dataclass(frozen=True)
class State:
    """One tensor of the optimizer's state for a parameter, or the moving average of a parameter.

    ``name``: its name in a checkpoint; ``placed`` and ``param``: this rank's parameter that it belongs to.
    """

    name: str
    placed: Placed
    param: Tensor
    key: str
    tensor: Tensor

    @property
    def described(self) -> Described:
        """The name of its parameter, its key, its shape if it differs from the parameter's, and its dtype."""
        alike = local(self.tensor).shape == local(self.param).shape
        shape = None if alike else tuple(self.tensor.shape)
        return self.placed.name, self.key, shape, spec(self.tensor).dtype


def states(s: Session) -> list[State]:
    """Returns the states of each parameter's first copy on this rank."""
    kept = [
        State(_named(key, p.name), p, t, key, tensor=value)
        for p, t in s.model.named()
        for key, value in pack(s.optimizer, t, _counters(s)).items()
    ]
    return [*kept, *_averages(s)]


def _averages(s: Session) -> list[State]:
    """Returns the moving averages of weights, if there are any."""
    params = dict(s.model.trainable())
    means = [] if s.average is None else s.average.named()
    return [State(_named(AVERAGE, p.name), p, params[p.name], AVERAGE, tensor=mean) for p, mean in means]


def _counters(s: Session) -> tuple[str, ...]:
    return s.plan.observed.optimizer.counters if s.plan.observed.optimizer is not None else ()


def _named(key: str, param: str) -> str:
    return f"optim.{key}.{param}"


def strategy(s: Session, optimizer_states: Sequence[State]) -> Strategy:
    """Returns the strategy of the weights and the ``optimizer_states``.

    Every rank calls this: the ranks agree on which states exist.
    """
    # collect the states of all ranks
    every = all_gather({x.name: x.described for x in optimizer_states}, dict[str, Described])

    placed = {p.name: p.layout for p in s.plan.params}
    entries = dict(strategy_of_plan(s.plan).entries)
    for theirs in every:
        for name, (param, key, shape, dtype) in theirs.items():
            entries[name] = Entry(_laid_out(s, placed[param], key, shape), dtype, "optim", ())
    return Strategy(s.plan.sizes.grid, entries)


def _laid_out(s: Session, param: Layout, key: str, shape: tuple[int, ...] | None) -> Layout:
    """Returns the layout of a state: that of the parameter, of a row or column of it, or unsharded.

    ``shape`` as in ``described``.
    """
    own = factor_layout(key, param) if s.plan.observed.optimizer is None else None
    if own is not None or shape is None:
        return own or param
    assert not (shape and param.axes), f"{key}: the plan refuses states of shape {shape} for sharded tensors"
    return replace(param, shape=shape, split=((),) * len(shape))


def tensors(s: Session, optimizer_states: Sequence[State]) -> dict[str, Tensor]:
    """Returns this rank's tensors by checkpoint name, including the ``optimizer_states``.

    They share memory with the model, except Python numbers of the optimizer's state.
    """
    out = {p.name: local(t.detach()) for p, t in s.model.named()}
    return out | {x.name: local(x.tensor) for x in optimizer_states}


def blob(t: Tensor) -> Blob:
    """Returns ``t`` as bytes; no copy when it is contiguous on the CPU."""
    flat = t.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else b""
    return Blob.of(spec(flat).dtype, tuple(flat.shape), raw)


def fill(t: Tensor, b: Blob) -> None:
    """Overwrites ``t`` with the values of ``b``."""
    new = unpacked(b)
    assert (new.dtype, new.shape) == (t.dtype, t.shape), f"{new.dtype} {new.shape} != {t.dtype} {t.shape}"
    t.copy_(new)


def unpacked(b: Blob) -> Tensor:
    """Returns the values of ``b`` in a new tensor."""
    raw = torch.empty(0, dtype=torch.uint8)
    if b.data.nbytes:  # frombuffer rejects empty buffers
        raw = torch.frombuffer(bytearray(b.data), dtype=torch.uint8)
    return raw.view(dtype_of(b.dtype)).reshape(b.shape)


def extra(s: Session) -> Mapping[str, Blob]:
    """Returns the state of this rank alone, needed to resume bit for bit in the same layout."""
    device = torch.device(s.world.device)
    streams = {f"{STREAM}{kind}": blob(state) for kind, state in devices.rng_states(device).items()}
    return streams | module_state.saved()


@torch.no_grad()
def load(s: Session, folder: Path, broadcast: bool = False) -> Mapping[str, Any]:
    """Loads weights, optimizer state and step of a checkpoint; in the same layout also random states.

    Returns the ``state`` that the checkpoint records. ``broadcast``: one rank reads each shard for all that
    have it; otherwise every rank reads its own shards.
    """
    checkpoint = open_checkpoint(folder, s.trust)

    # the model has adapters and the checkpoint has none: load its weights, but no optimizer state
    begins = strategy_to_load(s.plan, checkpoint.strategy.named)
    if len(begins.entries) < len(strategy_of_plan(s.plan).entries):
        mine = {n: t for n, t in tensors(s, []).items() if n in begins.entries}
        _read(s, checkpoint, begins, mine, broadcast=broadcast, kinds=("param", "buffer"))
        same_copies(s)
        _placed(s, checkpoint.state)
        restore_module_state(s, checkpoint, same_layout=False)
        return checkpoint.state

    averages = _averages_of(checkpoint.strategy)
    if s.average is not None and averages.entries:
        s.average.begin()

    # create tensors to read into; an optimizer of unknown state takes one step to create its state
    if s.plan.observed.optimizer is None:
        prime(s)
        _forget(s, checkpoint.strategy)
        optimizer_states = states(s)
    else:
        optimizer_states = _blank(s, checkpoint.strategy)
    if not averages.entries:
        optimizer_states = [x for x in optimizer_states if x.key != AVERAGE]

    # a moving average that this run does not keep has the checkpoint's layout
    target = strategy(s, optimizer_states)
    if s.average is None:
        target = with_left_out_tensors(target, averages)
    _read(s, checkpoint, target, tensors(s, optimizer_states), broadcast=broadcast)
    _give_back(s, optimizer_states)
    if s.average is not None and not averages.entries:
        s.average.begin_again()

    # restore the progress of training
    _placed(s, checkpoint.state)
    loss_scale = checkpoint.state.get("loss_scale")
    if s.scaling.dynamic and loss_scale:
        s.scaling.factor = float(loss_scale[0])
        s.scaling.good = int(loss_scale[1])
    same_layout = checkpoint.strategy.digest == target.digest
    restore_module_state(s, checkpoint, same_layout)
    if same_layout:
        _go_on(read_extra(checkpoint, s.world.rank), torch.device(s.world.device))
    return checkpoint.state


def _placed(s: Session, saved: Mapping[str, Any]) -> None:
    """Restores the step of ``saved``, and on every rank the position of rank 0's stream of samples."""
    s.step = int(saved["step"])
    s.scaling.skipped = int(saved.get("skipped", 0))
    place = saved.get("stream")
    if s.feed.stream is not None and isinstance(place, Mapping):
        s.feed.stream.go_on(place)


def _averages_of(saved: Strategy) -> Strategy:
    mean = _named(AVERAGE, "")
    return replace(saved, entries={n: e for n, e in saved.entries.items() if n.startswith(mean)})


def _blank(s: Session, saved: Strategy) -> list[State]:
    """Returns new tensors for the saved states of this rank's parameters; reads no optimizer state."""
    keys: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in saved.only("optim").entries.items():
        key, _, param = name.removeprefix("optim.").partition(".")
        keys.setdefault(param, []).append((key, entry))
    mine = [(p, t) for p, t in s.model.named() if p.trainable]
    kept = [
        State(_named(key, p.name), p, t, key, tensor=_room(s, p, t, key, entry=entry))
        for p, t in mine
        for key, entry in keys.get(p.name, [])
        if key != AVERAGE
    ]
    return [*kept, *_averages(s)]


def _room(s: Session, p: Placed, t: Tensor, key: str, entry: Entry) -> Tensor:
    """Returns zeros for a saved state, on the device where torch's optimizers keep it after loading.

    Counters and Python numbers are on the CPU, unless ``on_device`` returns true.
    """
    alike = entry.layout.shape == p.spec.shape
    counts = not alike and (key == "step" or "/" in key) and not on_device(s.optimizer, t)
    device = torch.device("cpu") if counts else t.device
    shape = local(t).shape if alike else entry.layout.shape
    return torch.zeros(shape, dtype=dtype_of(entry.dtype), device=device)


def _give_back(s: Session, optimizer_states: Sequence[State]) -> None:
    """Gives the optimizer its ``optimizer_states``, for every copy of a parameter."""
    if s.plan.observed.optimizer is not None:
        kept: dict[str, tuple[Tensor, dict[str, Tensor]]] = {p.name: (t, {}) for p, t in s.model.named()}
        for x in (x for x in optimizer_states if x.key != AVERAGE):
            kept[x.placed.name][1][x.key] = x.tensor
        for t, packed in kept.values():
            if packed or s.step:  # otherwise it keeps its initial state
                unpack(s.optimizer, t, packed)
    same_copies(s)


def _read(
    s: Session,
    checkpoint: Checkpoint,
    target: Strategy,
    mine: Mapping[str, Tensor],
    *,
    broadcast: bool,
    kinds: tuple[Kind, ...] = KINDS,
) -> None:
    """Reads tensors; records the bytes that all ranks read, and the bytes that they then hold."""
    rank = s.world.rank
    unread = _averages_of(target).entries if s.average is None else {}
    layouts = {name: entry.layout for name, entry in target.entries.items() if name not in unread}
    own = {name for name, layout in layouts.items() if not broadcast or layout.twins(rank)[0] == rank}
    bytes_read = 0
    for name, b in each(checkpoint, target, rank, kinds=kinds, only=own):
        fill(mine[name], b)
        bytes_read += b.data.nbytes

    # receive the rest from the ranks that have read it
    if broadcast:
        _share(s, mine, layouts)

    bytes_held = sum(t.nbytes for t in mine.values())
    total = torch.tensor([bytes_read, bytes_held], dtype=torch.int64)
    dist.all_reduce(total)
    s.results["load_bytes_read"] = int(total[0])
    s.results["load_bytes_held"] = int(total[1])


def broadcast(s: Session) -> Sent:
    """Sends weights, buffers and optimizer state of the first rank that has them to all replicas."""
    optimizer_states = states(s)
    layouts = {name: entry.layout for name, entry in strategy(s, optimizer_states).entries.items()}
    sent = _share(s, tensors(s, optimizer_states), layouts)
    _give_back(s, optimizer_states)
    return sent


def _share(s: Session, mine: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> Sent:
    """Shares tensors between replicas.

    Step counters and Python numbers are on the CPU, from which some backends cannot send: they are copied to
    the device first.
    """
    moved = {n: t.to(torch.device(s.world.device)) for n, t in mine.items()}
    sent = share({n: (t,) for n, t in moved.items()}, layouts)
    for n, t in moved.items():
        if t is not mine[n]:
            mine[n].copy_(t)
    return sent


def _forget(s: Session, saved: Strategy) -> None:
    """Removes optimizer state of parameters that had none when saved, as they never had a gradient."""
    for p, t in s.model.named():
        if not any(_named(key, p.name) in saved.entries for key in pack(s.optimizer, t)):
            unpack(s.optimizer, t, {})


def _go_on(own: Mapping[str, Blob], device: torch.device) -> None:
    """Restores the random states of this rank; keeps those of kinds that were not saved."""
    module_state.restore_streams(own)
    states = devices.rng_states(device)
    for kind, state in states.items():
        if f"{STREAM}{kind}" in own:
            fill(state, own[f"{STREAM}{kind}"])
    devices.set_rng_states(states, device)


def same_copies(s: Session) -> None:
    """Copies values and optimizer state of each tensor's first copy on this rank to its other copies."""
    first = {p.name: t for p, t in s.model.named()}
    for name, t in s.model.trainable():
        origin = first[s.model.first_name(name)]
        if origin is not t:
            local(t.detach()).copy_(local(origin.detach()))
            packed = pack(s.optimizer, origin, _counters(s))
            unpack(s.optimizer, t, {key: value.clone() for key, value in packed.items()})


def prime(s: Session) -> None:
    """Makes the optimizer create its state: it takes a step with learning rate and gradients of zero.

    Weights that this step changes are restored.
    """
    if s.optimizer.state:
        return

    kept = {t: local(t.detach()).clone() for _, t in s.model.trainable()}
    rates = [g["lr"] for g in s.optimizer.param_groups]
    for g in s.optimizer.param_groups:
        g["lr"] = 0.0
    for t in kept:
        t.grad = torch.zeros_like(t)

    s.optimizer.step()

    # restore everything, also weights, as decay or noise may have changed them
    s.optimizer.zero_grad(set_to_none=True)
    for g, lr in zip(s.optimizer.param_groups, rates, strict=True):
        g["lr"] = lr
    for t, value in kept.items():
        local(t.detach()).copy_(value)
