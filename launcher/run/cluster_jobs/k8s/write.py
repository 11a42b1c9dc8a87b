"""``launch=k8s``: what is refused, what is written into the run folder, and what to type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.kubernetes import Kubernetes
from launcher.plan.plan import Plan
from launcher.run.cluster_jobs import frozen_request
from launcher.run.cluster_jobs.k8s import manifests, pods
from launcher.run.cluster_jobs.k8s.manifests import ClusterJob
from launcher.run.cluster_jobs.k8s.pods import Values
from launcher.run.cluster_jobs.k8s.start_script import NodeCommand
from launcher.run.settle import home

KEY = "launch.k8s"
JOB, SKY = "job.yaml", "sky.yaml"
PORT = 29500
"""Pods have their own addresses, so no other job can occupy the port."""

KINDS: dict[str, tuple[str, Callable[[ClusterJob], Values], str]] = {
    "jobset": (JOB, manifests.jobset, "kubectl apply -f"),
    "pytorchjob": (JOB, manifests.pytorchjob, "kubectl apply -f"),
    "skypilot": (SKY, manifests.skypilot, "sky jobs launch"),
}
"""The file, its content, and the command that uses it."""


def refused(job: Job, outer: int | None) -> list[Problem]:
    """Problems that show before there is a plan; ``outer``: ranks that torchrun or srun has started."""
    settings = job.launch.k8s
    if settings is None:
        return []
    problems = frozen_request.refused(job, KEY, "Kubernetes", outer)
    return problems if outer is not None else [*problems, *_unshared(job, settings), *_unlike(job, settings)]


def _unshared(job: Job, settings: Kubernetes) -> list[Problem]:
    """Folders that the pods cannot see."""
    key, run = home(job)
    problems = []
    if not run.absolute().is_relative_to(settings.mount):
        text = f"{run}: the pods see {settings.mount} alone ({KEY}.mount), and the run folder is not in it"
        problems.append(Problem(key, text))
    if not _workdir(settings).is_relative_to(settings.mount):
        what = "it" if settings.workdir is not None else f"the current folder {_workdir(settings)}"
        text = f"{settings.workdir or 'null'}: the pods see {settings.mount} alone ({KEY}.mount), and {what}"
        problems.append(Problem(f"{KEY}.workdir", f"{text} is not in it", f"{KEY}.workdir={settings.mount}"))
    return problems


def _unlike(job: Job, settings: Kubernetes) -> list[Problem]:
    """Settings that this kind of job does not support."""
    problems = []
    if settings.kind == "skypilot" and settings.gpu is None and _gpus(job, settings, 1):
        text = "null: SkyPilot asks for GPUs by their name, as H100"
        problems.append(Problem(f"{KEY}.gpu", text))
    if settings.kind == "skypilot" and settings.env_from is not None:
        text = f"{settings.env_from}: a task of SkyPilot has no Secrets of Kubernetes"
        problems.append(
            Problem(f"{KEY}.env_from", f"{text}; sky jobs launch --secret NAME hands variables on")
        )
    if settings.kind == "pytorchjob" and job.launch.max_restarts:
        again = "a PyTorchJob starts a run again that was told to stop, none that failed"
        text = f"{job.launch.max_restarts}: {again}; a JobSet does"
        problems.append(Problem("launch.max_restarts", text))
    return problems


def _workdir(settings: Kubernetes) -> Path:
    return Path.cwd() if settings.workdir is None else Path(settings.workdir)


def _gpus(job: Job, settings: Kubernetes, each: int) -> int:
    """The GPUs of a node with ``each`` ranks."""
    if settings.gpus_per_node is not None:
        return settings.gpus_per_node
    return 0 if job.launch.device == "cpu" else each


def write(job: Job, plan: Plan, run: Path) -> str:
    """Writes the request and the job into the run folder. Returns what to type."""
    settings = job.launch.k8s
    assert settings is not None
    each = frozen_request.write(job, plan, run)
    file, document, command = KINDS[settings.kind]
    called = cluster_job(job, settings, each, run.absolute())
    about = (f"Written by launcher, for the run folder that it is in: {command} {run.absolute() / file}",)
    for other in {JOB, SKY} - {file}:  # of a start with another kind
        (run / other).unlink(missing_ok=True)
    write_text(run / file, manifests.as_yaml(document(called), about))
    return f"{command} {run / file}"


def cluster_job(job: Job, settings: Kubernetes, each: int, run: Path) -> ClusterJob:
    """The values of the job; ``each``: ranks per node; ``run``: an absolute path."""
    words = (settings.python, "-m", "launcher", f"recipe={run / frozen_request.NAME}", f"run_dir={run}")
    command = NodeCommand(words, str(_workdir(settings)), job.launch.nnodes, each, settings.setup)
    return ClusterJob(
        name=pods.name(job.name, run.name),
        settings=settings,
        command=command,
        port=job.launch.port or PORT,
        gpus=_gpus(job, settings, each),
        restarts=job.launch.max_restarts,
    )
