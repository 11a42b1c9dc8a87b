"""The place of this process among the ranks, and its default process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from launcher.runtime import device as devices
from launcher.runtime import malloc
from launcher.runtime.cluster.flight_recorder import recording
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.torch_private.selftest import SET_TIMEOUT

_BARRIER = "TORCH_DIST_INIT_BARRIER"


def _nowhere(_: object) -> None:
    """Drops what is sent without a supervisor."""


def no_stop_signal() -> int:
    """Returns the default ``stop_signal``: without a supervisor no signal asks a rank to stop."""
    return 0


@dataclass(frozen=True)
class World:
    """One rank's place. ``device`` is ``cpu`` or ``<kind>:<local_rank>``; ``attempt`` counts restarts from 0.

    ``send(obj)`` sends a small picklable object to the supervisor while the rank runs; without a supervisor
    it is dropped. ``stop_signal()`` returns the signal that asked this rank to stop, or 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    device: str
    backend: str
    send: Callable[[object], None] = field(default=_nowhere, compare=False, repr=False)
    stop_signal: Callable[[], int] = field(default=no_stop_signal, compare=False, repr=False)


def place(device: str, local_rank: int) -> str:
    """Returns the device of one rank: ``npu`` becomes ``npu:1`` on local rank 1."""
    return device if device == "cpu" else f"{device}:{local_rank}"


def backend_of(device: str) -> str:
    """Returns the collective backends for a device."""
    return devices.backends(device)


def world_at(at: Place, device: str = "cpu", backend: str | None = None) -> World:
    """Returns the ``World`` of a rank whose place an outer launcher has assigned."""
    return World(
        rank=at.rank,
        size=at.size,
        local_rank=at.local_rank,
        local_size=at.local_size,
        attempt=at.attempt,
        device=place(device, at.local_rank),
        backend=backend or backend_of(device),
    )


def directly(join: Callable[[], None]) -> None:
    """Joins the other ranks in this thread."""
    join()


@contextmanager
def connect(
    world: World,
    store: Store,
    timeout_s: float,
    threads: int = 1,
    folder: Path | None = None,
    attend: Callable[[Callable[[], None]], None] = directly,
) -> Iterator[None]:
    """Creates the default process group for the block, and destroys it afterwards.

    After an error it is not destroyed, as that waits for peers that may wait for this rank: end the process
    by ``os._exit`` then. ``timeout_s`` bounds each collective of each group. Store keys are separated by
    attempt, so that no rank reads addresses of dead ones. ``folder``: the run folder, where the last
    collectives are written if one hangs. ``attend`` runs the joining, in any thread.
    """
    torch.set_num_threads(threads)
    device = torch.device(world.device)
    accelerated = devices.is_accelerator(device)
    if accelerated:
        devices.use(device)
    else:
        malloc.keep_freed_memory()

    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)

    def join() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is set per thread
        dist.init_process_group(
            world.backend,
            store=PrefixStore(f"attempt{world.attempt}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if accelerated else None,
        )
        if accelerated:
            devices.bind(device)

    with bounded(timeout), _complete(), recording(folder):
        attend(join)
        yield
        dist.destroy_process_group()


@contextmanager
def _complete() -> Iterator[None]:
    """Makes process groups created in the block complete before any rank continues.

    A rank that leaves early would disturb a slow one that is still connecting.
    """
    before = os.environ.get(_BARRIER)
    os.environ.setdefault(_BARRIER, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_BARRIER, None)


@contextmanager
def bounded(timeout: timedelta) -> Iterator[None]:
    """Gives process groups created in the block, by any code, ``timeout`` unless they set their own.

    A group does not inherit the world's timeout: torch gives it half an hour, and a mesh cannot set another.
    """
    c10d: Any = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout if before[1] is not None else None
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def usual_timeout() -> timedelta:
    """Returns the timeout of a process group that is created now."""
    timeout: timedelta = dist.distributed_c10d.default_pg_timeout
    return timeout


def set_timeouts(timeout: timedelta) -> None:
    """Sets the timeout of collectives for every existing group of this rank.

    Messages between two ranks over gloo keep the timeout with which their group was created.
    """
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if not c10d._rank_not_in_group(group):
            getattr(c10d, SET_TIMEOUT)(timeout, group)


def deterministic() -> None:
    """Makes operations without a deterministic form raise; call it before the first use of devices."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
