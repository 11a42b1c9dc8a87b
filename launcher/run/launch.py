"""Resolves the ``launch`` settings for this process and machine: how and where ranks start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.errors import Problem, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Parallel
from launcher.plan import drill
from launcher.plan.values.note import Note
from launcher.run.launch_device import backend, device
from launcher.runtime.cluster.launch_env import place

Mode = Literal["spawn", "external", "inproc"]
THEY = "torchrun or srun"


@dataclass(frozen=True)
class Start:
    """How ranks start. ``backend`` ``None``: the default for ``device``, which is ``cpu`` or an accelerator.

    ``notes``: settings that have no effect, and why.
    """

    mode: Mode
    device: str
    backend: str | None
    notes: tuple[str, ...]


def outer_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of ranks that torchrun or srun has started.

    Returns ``None`` if neither started this process.
    """
    at = place(env)
    return None if at is None else at.size


def with_local_ranks(job: Job, outer: int | None) -> Job:
    """Sets ``launch.nproc: null`` to the ranks per node of an outer launcher."""
    if outer is None or mode(job, outer) != "external":
        return job
    job = _on_those_left(job)
    each, rest = divmod(outer, job.launch.nnodes)
    if job.launch.nproc is not None or rest:
        return job
    return job.model_copy(update={"launch": job.launch.model_copy(update={"nproc": each})})


def _on_those_left(job: Job) -> Job:
    """Applies ``launch.elastic``: fewer nodes than requested run fewer replicas on the same global batch."""
    there = place()
    nodes = 0 if there is None else there.size // there.local_size
    if there is None or not job.launch.elastic or not 0 < nodes < job.launch.nnodes:
        return job
    launch = job.launch.model_copy(update={"nnodes": nodes})
    replicas = there.size // (job.parallel.pipeline.stages * (job.parallel.grid.tp or 1))
    return job.model_copy(update={"launch": launch, "parallel": _over(job.parallel, replicas)})


def _over(requested: Parallel, replicas: int) -> Parallel:
    """Returns the same layout on ``replicas`` data-parallel ranks, with the largest shards that fit."""
    hsdp, shard = requested.hsdp, requested.grid.dp_shard
    size = shard if hsdp is None or hsdp.shard_size < 1 else hsdp.shard_size
    fits = max((n for n in range(1, (size or 0) + 1) if replicas and replicas % n == 0), default=size)
    if hsdp is not None and hsdp.shard_size > 0:
        hsdp = hsdp.model_copy(update={"shard_size": fits})
    grid = requested.grid.model_copy(
        update={"dp_replicate": None, "dp_shard": None if shard is None else fits}
    )
    return requested.model_copy(update={"hsdp": hsdp, "grid": grid})


def elastic_notes(requested: Job, here: Job) -> tuple[Note, ...]:
    """Notes what ``launch.elastic`` has changed."""
    if here.launch.nnodes == requested.launch.nnodes:
        return ()
    why = "the nodes that are left (launch.elastic)"
    notes = [Note("launch.nnodes", f"{requested.launch.nnodes} -> {here.launch.nnodes}: {why}")]
    before, now = requested.parallel.hsdp, here.parallel.hsdp
    if before is not None and now is not None and before != now:
        text = f"{before.shard_size} -> {now.shard_size}: the largest that divides the ranks that are left"
        notes.append(Note("parallel.hsdp.shard_size", text))
    return tuple(notes)


def mode(job: Job, outer: int | None) -> Mode:
    """Returns the launch mode; ``auto`` joins an outer launcher if there is one."""
    if job.launch.mode == "auto":
        return "spawn" if outer is None else "external"
    return job.launch.mode


def problems(job: Job, outer: int | None) -> list[Problem]:
    """Returns problems that can be found without a plan."""
    if job.launch.slurm is not None or job.launch.k8s is not None:  # started elsewhere
        return [*_ranks_not_restarted(job)]
    requested, problems = job.launch.mode, []
    if requested == "external" and outer is None:
        text = "external: neither torchrun nor srun has started this process"
        problems.append(Problem("launch.mode", f"{text}; launch.mode=auto starts the ranks itself"))
    if requested in ("spawn", "inproc") and outer is not None and outer > 1:
        text = (
            f"{requested}: {THEY} has started {outer} processes, and each of them would do the complete run"
        )
        problems.append(Problem("launch.mode", text, "launch.mode=auto"))
    if mode(job, outer) != "external" and job.launch.nnodes > 1:
        nodes = job.launch.nnodes
        text = f"{nodes}: without {THEY} the launcher starts ranks on this machine only"
        text += (
            f"; run torchrun --nnodes {nodes} -m launcher ... on each node, or submit it with launch=slurm"
        )
        problems.append(Problem("launch.nnodes", text))
    return [*problems, *_drill_cannot_happen(job, mode(job, outer))]


def _drill_cannot_happen(job: Job, how: Mode) -> Iterator[Problem]:
    """Yields problems of a drill that needs an outer launcher, or ends ranks that nothing restarts."""
    fault = job.debug.drill
    if fault is None or how == "external":
        return
    if fault.lose_node is not None:
        text = f"without {THEY} this machine is the only node, and nothing restarts it"
        yield Problem("debug.drill.lose_node", text)
    elif how == "inproc" and drill.restarts(job):
        text = "inproc: a rank in this process is not restarted, and debug.drill ends it"
        yield Problem("launch.mode", text, "launch.mode=auto")
    else:
        yield from _ranks_not_restarted(job)


def _ranks_not_restarted(job: Job) -> Iterator[Problem]:
    """Yields problems of a drill that ends ranks which would not be restarted."""
    if job.debug.drill is None or not drill.restarts(job) or job.launch.max_restarts:
        return
    if job.launch.k8s is not None and job.launch.k8s.kind == "pytorchjob":  # it does not restart a failed job
        text = "pytorchjob: debug.drill ends a rank, and a PyTorchJob that fails is not restarted"
        yield Problem("launch.k8s.kind", f"{text}; a JobSet is restarted if launch.max_restarts=1")
        return
    text = "0: debug.drill ends a rank, and the ranks would not be restarted"
    yield Problem("launch.max_restarts", text, "launch.max_restarts=1")


def start(job: Job, outer: int | None, size: int) -> Start:
    """Returns how the ``size`` ranks of the plan start. Raises ``RequestError``."""
    refuse(mismatched(job, outer, size))
    how = mode(job, outer)

    # their devices and backends
    where, notes = device(job, -(-size // job.launch.nnodes))
    return Start(how, where, backend(job, where), (*notes, *_idle(job, how)))


def mismatched(job: Job, outer: int | None, size: int) -> list[Problem]:
    """Returns problems if the ``size`` of the plan differs from the number of ranks.

    That is the number that exist, or that can exist.
    """
    how = mode(job, outer)
    if how == "inproc" and size > 1:
        text = f"inproc: one process is one rank, but the plan has {size}; debug=onerank plans for one"
        return [Problem("launch.mode", text)]
    if how == "external" and outer is not None and size != outer:
        text = f"{job.launch.nproc}: the plan has {size} ranks, {THEY} has started {outer}"
        return [Problem("launch.nproc", text, f"launch.nproc={outer // job.launch.nnodes}")]
    return []


def _idle(job: Job, how: Mode) -> list[str]:
    """Returns notes on settings that have no effect in this mode."""
    out = []
    restarts = f"launch.max_restarts {job.launch.max_restarts} has no effect"
    if how == "external" and job.launch.max_restarts:
        out.append(f"{restarts}: {THEY} restarts the ranks, if it is set to")
    if how == "inproc" and job.launch.max_restarts:
        out.append(f"{restarts}: a rank in this process is not restarted")
    if how != "external" and job.launch.elastic:
        out.append("launch.elastic has no effect: on this machine all ranks start, or none")
    if how != "spawn" and job.launch.port is not None:
        where = (
            f"{THEY} sets the rendezvous of its ranks"
            if how == "external"
            else "one rank needs no rendezvous"
        )
        out.append(f"launch.port {job.launch.port} has no effect: {where}")
    return out


def command(words: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the command for the same run; ``words`` follow ``launcher``."""
    at = place(env)
    if at is not None and "TORCHELASTIC_RUN_ID" in env:
        there = ["--nnodes", env.get("GROUP_WORLD_SIZE", "1"), "--nproc-per-node", str(at.local_size)]
        return ["torchrun", *there, "-m", "launcher", *words]
    if at is not None and "SLURM_STEP_NUM_TASKS" in env:
        return ["srun", "--ntasks", str(at.size), "python", "-m", "launcher", *words]
    return ["python", "-m", "launcher", *words]


def port_is_free(job: Job, start: Start) -> None:
    """Raises ``RequestError`` if ``launch.port`` is in use; called before a run folder is created."""
    if start.mode == "spawn" and job.launch.port is not None:
        from launcher.runtime.cluster.rendezvous import rendezvous

        with rendezvous(job.launch.port):
            return
