"""Which rank this process is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]


def _nowhere(_: object) -> None:
    """What is sent without a supervisor is dropped."""


@dataclass(frozen=True)
class World:
    """One rank's place. ``device`` is ``cpu`` or ``cuda:<local_rank>``; ``attempt`` counts restarts from 0.

    ``send(obj)`` hands a small picklable object to the supervisor while the rank runs on; without one it is dropped.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    device: str
    backend: str
    send: Callable[[object], None] = field(default=_nowhere, compare=False, repr=False)


def place(device: str, local_rank: int) -> str:
    """The device of one rank: ``cuda`` is ``cuda:1`` on local rank 1."""
    return device if device == "cpu" else f"{device}:{local_rank}"


def backend_of(device: str) -> str:
    """The collectives that fit a device; next to NCCL, gloo carries what lives in host memory."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"


def outer(device: str = "cpu", backend: str | None = None, env: Mapping[str, str] = os.environ) -> World | None:
    """Our place if torchrun or srun already started every rank, else ``None``.

    The shell of ``sbatch`` has SLURM_PROCID too, but only ``srun`` sets SLURM_STEP_NUM_TASKS.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        rank, size, local = (int(env[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        here, attempt = int(env.get("LOCAL_WORLD_SIZE", size)), int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
        local, attempt = int(env["SLURM_LOCALID"]), int(env.get("SLURM_RESTART_COUNT", 0))
        here = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[int(env["SLURM_NODEID"])]
    else:
        return None
    return World(rank, size, local, here, attempt, place(device, local), backend or backend_of(device))


def outer_store(world: World, timeout_s: float, env: Mapping[str, str] = os.environ) -> Store:
    """The store that the outer launcher's ranks share: torchrun's own, or one that rank 0 hosts."""
    host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    port = int(env.get("MASTER_PORT") or step_port(env))
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent listens there already
    return TCPStore(
        host, port, world.size, is_master=world.rank == 0 and not hosted, timeout=timedelta(seconds=timeout_s)
    )


def step_port(env: Mapping[str, str]) -> int:
    """A port that all tasks of one Slurm step agree on, below those that systems hand out.

    >>> step_port({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"})
    16233
    """
    return 15000 + (16 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 15000


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's short form, spelt out.

    >>> tasks_per_node("4(x2),1")
    (4, 4, 1)
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(n) for n, times in found for _ in range(int(times or 1)))


def first_host(nodes: str) -> str:
    """The first of Slurm's node list.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match, nodes
    return "".join(part or "" for part in match.groups())


@contextmanager
def connect(world: World, store: Store, timeout_s: float, threads: int = 1) -> Iterator[None]:
    """The default process group for the block, destroyed after it.

    An error leaves it as it is, for taking it down waits for peers that may wait for us: end the process then, by
    ``os._exit``. ``timeout_s`` bounds each collective of each group. Keys are kept apart by attempt: none reads the
    addresses of the dead.
    """
    torch.set_num_threads(threads)
    device, timeout = torch.device(world.device), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store.set_timeout(timeout)
    # every group is complete before anybody goes on: a rank that leaves early would break the connecting of a slow one
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    with bounded(timeout):
        dist.init_process_group(
            world.backend,
            store=PrefixStore(f"attempt{world.attempt}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        yield
        dist.destroy_process_group()


@contextmanager
def bounded(timeout: timedelta) -> Iterator[None]:
    """Groups made in the block, by us, by torch or by the user's own code, take ``timeout`` if not told another.

    A group does not inherit that of the world: torch gives it half an hour, and a mesh has no way to say another.
    """
    c10d: Any = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout if before[1] is not None else None
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def deterministic() -> None:
    """From here on an operation without a deterministic form raises; call it before the first use of a device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
