"""Reads the environment of torchrun or srun, without trusting it and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.errors import Problem, collecting_problems

DAMAGED = "the environment of torchrun or srun is damaged, or was set by hand"
SECRET_FILE = "LAUNCHER_SECRET_FILE"
"""The variable that names the file with the secret that signs messages between ranks.

Only this user can read the file.
"""


@dataclass(frozen=True)
class Place:
    """One of ``size`` processes. ``attempt`` counts restarts from 0.

    The shared store is at ``host`` and ``port``; ``hosted``: the outer launcher serves it, otherwise rank 0
    does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int
    host: str
    port: int
    hosted: bool = False


def rank(env: Mapping[str, str] = os.environ) -> int | None:
    """Returns this process's rank if an outer launcher started it.

    The other variables may be missing.
    """
    with collecting_problems() as wrong:
        read = _Reader(env, wrong)
        launcher = _outer_launcher(read)
        if launcher is None:
            return None
        return read.number("RANK" if launcher == "torchrun" else "SLURM_PROCID")


def place(env: Mapping[str, str] = os.environ) -> Place | None:
    """Returns this process's place if torchrun or srun started the ranks, else ``None``.

    Raises ``RequestError``.
    """
    with collecting_problems() as wrong:
        read = _Reader(env, wrong)
        launcher = _outer_launcher(read)
        if launcher == "srun":
            return _srun(read)
        if launcher == "torchrun" and (read.number("WORLD_SIZE") != 1 or not read.lacks()):
            return _torchrun(read)
    return None


def _outer_launcher(read: _Reader) -> Literal["torchrun", "srun"] | None:
    """Returns the outer launcher that started this process as one of several; ``None`` without one.

    The shell of ``sbatch`` also has SLURM_PROCID and SLURM_NTASKS, but only ``srun`` sets
    SLURM_STEP_NUM_TASKS.
    """
    if "RANK" in read.env and "WORLD_SIZE" in read.env:
        return "torchrun"
    if "SLURM_PROCID" in read.env and read.number("SLURM_STEP_NUM_TASKS", 1) > 1:
        return "srun"
    return None


class _Reader:
    """Reads numbers from the environment; reports malformed ones as problems and uses defaults for them."""

    def __init__(self, env: Mapping[str, str], problems: list[Problem]) -> None:
        self.env = env
        self.problems = problems

    def number(self, name: str, default: int = 0, below: int | None = None) -> int:
        text = self.env.get(name, str(default))
        if re.fullmatch(r"[0-9]{1,18}", text) is None:
            self.wrong(f"{name} is {text!r}, which is not a whole number of at least 0")
            return default
        if below is not None and int(text) >= below:
            self.wrong(f"{name} is {text}, which is not below {below}")
        return int(text)

    def wrong(self, text: str) -> None:
        self.problems.append(Problem("", f"{text}: {DAMAGED}"))

    def lacks(self) -> list[str]:
        return [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not self.env.get(name)]


def _torchrun(read: _Reader) -> Place | None:
    if lacking := read.lacks():
        they = " and ".join(lacking)
        text = (
            f"RANK and WORLD_SIZE are set, but not {they}: torchrun sets them all; "
            "start the ranks with it, or unset RANK and WORLD_SIZE so that this command starts them"
        )
        read.problems.append(Problem("launch.mode", text))
        return None

    size = read.number("WORLD_SIZE")
    if not size:
        if not read.problems:
            read.wrong("WORLD_SIZE is 0, but must be at least 1")
        return None

    here = read.number("LOCAL_WORLD_SIZE", size)
    return Place(
        rank=read.number("RANK", below=size),
        size=size,
        local_rank=read.number("LOCAL_RANK", below=here),
        local_size=here,
        attempt=read.number("TORCHELASTIC_RESTART_COUNT"),
        host=read.env["MASTER_ADDR"],
        port=read.number("MASTER_PORT", below=1 << 16),
        hosted=read.env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _srun(read: _Reader) -> Place | None:
    # the number of ranks, here and in total
    size = read.number("SLURM_STEP_NUM_TASKS")
    each = read.env.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes = tasks_per_node(each)
    if sum(nodes) != size:
        tasks = f"the {size} tasks of SLURM_STEP_NUM_TASKS"
        read.wrong(f"SLURM_STEP_TASKS_PER_NODE is {each!r}, which does not add up to {tasks}")
        return None
    node = read.number("SLURM_NODEID", below=len(nodes))
    here = nodes[node] if node < len(nodes) else size

    # the rendezvous: the first node of the step, at a port that only this step uses
    names = read.env.get("SLURM_STEP_NODELIST", "")
    host = read.env.get("MASTER_ADDR") or first_host(names)
    if not host:
        read.wrong(f"SLURM_STEP_NODELIST is {names!r}, which names no node")
    job, step = read.number("SLURM_JOB_ID"), read.number("SLURM_STEP_ID")
    port = read.number("MASTER_PORT", step_port(job, step), below=1 << 16)

    local = read.number("SLURM_LOCALID", below=here)
    return Place(
        rank=read.number("SLURM_PROCID", below=size),
        size=size,
        local_rank=local,
        local_size=here,
        attempt=read.number("SLURM_RESTART_COUNT"),
        host=host or "",
        port=port,
    )


def step_port(job: int, step: int) -> int:
    """Returns a port that all tasks of a Slurm step compute in the same way, below the ephemeral ports.

    >>> step_port(77, 1)
    16233
    """
    return 15000 + (16 * job + step) % 15000


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Expands Slurm's short form; returns an empty tuple if ``text`` does not have that form.

    >>> tasks_per_node("4(x2),1"), tasks_per_node("many")
    ((4, 4, 1), ())
    """
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return tuple(int(p[1]) for p in parts if p for _ in range(int(p[2] or 1))) if all(parts) else ()


def first_host(nodes: str) -> str | None:
    """Returns the first host of a Slurm node list.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,a2"), first_host("")
    ('gpu007', 'a1', None)
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else None


def job(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns an identifier that stays the same when Slurm requeues a job; ``None`` outside Slurm."""
    if not env.get("SLURM_JOB_ID"):
        return None
    number = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        number = f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '')}"
    return f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {number}"


def again(env: Mapping[str, str] = os.environ) -> bool:
    """Returns true if the outer launcher has restarted this job."""
    counts = (env.get("SLURM_RESTART_COUNT", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return any(count.isdecimal() and int(count) > 0 for count in counts)
