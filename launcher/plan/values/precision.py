"""The dtypes of a training, and its loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job.schema.job import Job

DTYPE = {"fp32": "float32", "fp64": "float64", "bf16": "float32", "fp16": "float32"}
"""The dtype of weights, gradients and optimizer state for each ``train.precision``."""
COMPUTE = DTYPE | {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype that the model computes in for each ``train.precision``."""
HALF = ("bfloat16", "float16")


FIRST_SCALE = 65536.0
"""The initial scale of dynamic loss scaling, as in torch's GradScaler."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training, and its loss scale.

    ``kept``: the dtype of weights, gradients and optimizer state. ``compute``: the dtype that the model
    computes in. ``reduce``: the dtype that gradients are sent in.

    ``scale``: the factor of the loss before backward; ``None`` for 1. If ``dynamic``, it is the initial one.
    """

    kept: str
    compute: str
    reduce: str
    scale: float | None
    dynamic: bool

    @property
    def mixed(self) -> bool:
        return self.kept != self.compute

    @property
    def low(self) -> str | None:
        """The half precision to compute in, if any."""
        return self.compute if self.mixed else None


def precision(job: Job) -> Precision:
    """Returns the dtypes of ``job``.

    Gradients are sent in the dtype that they are kept in, unless both ``gradient_fp32_sync`` and
    ``fp32_communication`` are off.
    """
    kept, compute = DTYPE[job.train.precision], COMPUTE[job.train.precision]
    low = not (job.parallel.gradient_fp32_sync or job.parallel.fp32_communication)
    scaled = compute == "float16"
    scale = (job.train.loss_scale or FIRST_SCALE) if scaled else None
    return Precision(
        kept=kept,
        compute=compute,
        reduce=compute if low else kept,
        scale=scale,
        dynamic=scaled and job.train.loss_scale is None,
    )
