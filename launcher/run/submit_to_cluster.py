"""Hands a run to a cluster: chooses the cluster, checks the request, writes the job and submits it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.optional import kubernetes, lacking
from launcher.plan.plan import Plan
from launcher.run import slurm, slurm_files

JOB, SKY = "job.yaml", "sky.yaml"
"""The manifests in a run folder for Kubernetes, and for SkyPilot."""


def key(job: Job) -> str | None:
    """Returns the setting that makes the run start elsewhere; ``None`` if it starts here."""
    return next(
        (f"launch.{name}" for name in ("slurm", "k8s") if getattr(job.launch, name) is not None), None
    )


def problems(job: Job, outer: int | None) -> list[Problem]:
    """Returns problems that can be found without a plan.

    ``outer``: ranks that torchrun or srun has started.
    """
    if job.launch.slurm is not None and job.launch.k8s is not None:
        text = "launch.k8s and launch.slurm are both set; leave one out"
        return [Problem("launch.k8s", text)]
    if job.launch.k8s is not None:
        return lacking("kubernetes", "launch.k8s") or kubernetes.problems(job, outer)
    return slurm.problems(job, outer)


def submit(job: Job, plan: Plan, run: Path) -> tuple[str, dict[str, str]]:
    """Writes the job into the run folder, and submits it if requested.

    Returns a message, and additional fields for the status. Raises ``RunError``.
    """
    if job.launch.k8s is not None:
        return f"not submitted: {kubernetes.write(job, plan, run)}", {}
    number = slurm.submit(job, plan, run)
    if not number:
        return f"not submitted: sbatch {quote(str(run / slurm_files.SCRIPT_FILE))}", {}
    file = run / slurm_files.SCRIPT_FILE
    message = f"job {number} of Slurm, {file}; its output: tail -F {quote(f'{run}/slurm-{number}.log')}"
    return message, {"slurm": number}
