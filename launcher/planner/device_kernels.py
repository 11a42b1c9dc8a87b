"""Which kernels a plan counts with: CUDA has some that a CPU lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Note
from launcher.plan.settings.cluster import accelerators
from launcher.plan.settings.device_matrix import over_device_matrix
from launcher.plan.values.facts import COMPUTE, Graph

KEY = "launch.device"
CUDA = "cuda"
_on_device = ContextVar("planned_on_device", default=False)


def on_device() -> bool:
    """Whether the plan that is being made is for devices of their own."""
    return _on_device.get()


@contextmanager
def counted(job: Job, size: int) -> Iterator[None]:
    """Plan ``size`` ranks with the kernels of the devices that they will run on."""
    from launcher.models.attention import grouped_heads
    from launcher.parallel.cost.fused_kernels import fused_norms

    there = accelerators(job) or _here(job, -(-size // job.launch.nnodes))
    before = _on_device.set(there)
    try:
        cuda = there and job.launch.device in ("auto", CUDA)
        with fused_norms(there), grouped_heads(cuda and not over_device_matrix(job)):
            yield
    finally:
        _on_device.reset(before)


def notes(job: Job, graph: Graph) -> Iterator[Note]:
    """Which attention is counted; of CPUs, what each torch has, nothing is said."""
    known = job.launch.device in ("auto", CUDA)
    if not known or not on_device() or not any(n.operations.attention for n in graph.nodes):
        return
    half = COMPUTE[job.train.precision] in ("bfloat16", "float16")
    kernel = "cuDNN's or flash's kernel" if half else "the memory-efficient kernel"
    yield Note(KEY, f"attention counts as by {kernel}, norms as by CUDA's: {_why(job)}")


def _why(job: Job) -> str:
    """Why the plan is for CUDA devices."""
    if job.launch.device != "auto":
        return job.launch.device
    if job.cluster.links is not None:
        return f"auto, on devices of {job.cluster.name or 'the cluster'}"
    return "auto -> cuda, a device of this machine for each rank"


def device(job: Job) -> str:
    """``launch.device``; of ``auto`` the CPU, where ranks start here and there is no device for each."""
    import torch

    launch = job.launch
    if launch.device != "auto" or job.cluster.links is not None or launch.slurm or launch.k8s:
        return launch.device
    return "auto" if torch.accelerator.device_count() >= (launch.nproc or 1) else "cpu"


def _here(job: Job, ranks: int) -> bool:
    """Whether ``launch.device=auto`` takes the devices of this machine, of which each of its ranks needs one.

    A cluster that is named, and a job that starts elsewhere, say nothing of this machine.
    """
    launch = job.launch
    if launch.device != "auto" or job.cluster.links is not None or launch.slurm or launch.k8s:
        return False
    return devices() >= ranks


def devices() -> int:
    """The CUDA devices of this machine, of which none is touched."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if kind is not None and kind.type == CUDA else 0
