"""Decides which device's kernels a plan counts: those of the devices that its ranks will run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from launcher.job.schema.job import Job
from launcher.plan.memory.fits_cluster import accelerators
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.note import Note
from launcher.plan.values.precision import COMPUTE

if TYPE_CHECKING:
    from launcher.parallel.cost.kernels import SupportedKernels

KEY = "launch.device"
CUDA = "cuda"
ATTENTION_OPERATORS = (
    "scaled_dot_product_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
)  # fmt: skip
NORM_OPERATORS = ("rms_norm", "_fused_rms_norm")
"""Operators that a device registers only if it computes them in a single kernel."""
_kind = ContextVar("planned_kind", default="cpu")


def planned_kind() -> str:
    """Returns the kind of device that the current plan is made for."""
    return _kind.get()


@contextmanager
def counted(job: Job, sizes: Sizes) -> Iterator[None]:
    """Plans with the kernels of the devices that the ranks will run on."""
    from launcher.models.language_model import grouped_heads
    from launcher.parallel.cost.kernels import counted_as

    known, count = local_accelerators()
    kind = _planned(job, known if count >= -(-sizes.grid.size // job.launch.nnodes) else None)
    before = _kind.set(kind)
    try:
        fused = kernels_of(kind, here=kind == known)
        with counted_as(fused), grouped_heads(kind == CUDA and not sizes.engine.over_matrices):
            yield
    finally:
        _kind.reset(before)


def kernels_of(kind: str, here: bool) -> SupportedKernels:
    """Returns the kernels of devices of a ``kind``.

    ``here``: this process's torch supports it and can be queried. A device that torch does not support here
    is assumed to have CUDA's kernels.
    """
    import torch

    from launcher.parallel.cost.kernels import CPU, SupportedKernels

    if kind == "cpu":
        return CPU
    if kind == CUDA or not here:
        return SupportedKernels(norms=True, wide=True)
    outside = kind == torch._C._get_privateuse1_backend_name()
    key = "PrivateUse1" if outside else kind.upper()

    def one_of(names: Sequence[str]) -> bool:
        """Returns true if torch has a kernel of this device for any of these operators that it knows."""
        operators = (getattr(torch.ops.aten, name, None) for name in names)
        return any(op.default.has_kernel_for_dispatch_key(key) for op in operators if op is not None)

    attention = one_of(ATTENTION_OPERATORS)
    return SupportedKernels(attention=attention, norms=one_of(NORM_OPERATORS), wide=attention)


def notes(job: Job, graph: Graph) -> Iterator[Note]:
    """Notes which attention kernel is counted.

    CPU plans get no note, as every torch has the kernels of the CPU.
    """
    if planned_kind() != CUDA or not any(n.operations.attention for n in graph.nodes):
        return
    half = COMPUTE[job.train.precision] in ("bfloat16", "float16")
    kernel = "cuDNN's or flash's kernel" if half else "the memory-efficient kernel"
    yield Note(KEY, f"attention is estimated with {kernel}, norms with CUDA's: {_why(job)}")


def _why(job: Job) -> str:
    """Returns why the plan is for CUDA devices."""
    if job.launch.device != "auto":
        return job.launch.device
    if job.cluster.links is not None:
        return f"auto, on devices of {job.cluster.name or 'the cluster'}"
    return "auto -> cuda, a device of this machine for each rank"


def _planned(job: Job, here: str | None) -> str:
    """Returns the kind of device that ranks run on.

    With ``launch.device=auto``, a cluster of accelerators counts as CUDA devices, and any other named cluster
    or other machines (Slurm, Kubernetes) as CPUs. Only a job for this machine takes ``here``: the kind of its
    devices, if it has one for each of its ranks.
    """
    launch = job.launch
    if accelerators(job):
        return CUDA if launch.device == "auto" else launch.device
    elsewhere = job.cluster.links is not None or launch.slurm or launch.k8s
    return here if launch.device == "auto" and here is not None and not elsewhere else "cpu"


def local_accelerators() -> tuple[str | None, int]:
    """Returns the kind of this machine's accelerators and their number; initializes none of them."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return (None, 0) if kind is None else (kind.type, torch.accelerator.device_count())
