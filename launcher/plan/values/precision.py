"""The dtypes that training computes in, keeps, and sends."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job.schema.job import Job
from launcher.plan.values.facts import COMPUTE, DTYPE

FIRST_SCALE = 65536.0
"""Where dynamic loss scaling begins, as torch's GradScaler does."""


@dataclass(frozen=True)
class Precision:
    """Dtypes: ``kept`` of weights, gradients and optimizer state, ``compute`` of the model.

    ``reduce``: of gradients as they travel.

    ``scale``: what the loss is multiplied by before backward, ``None`` for 1; with ``dynamic`` only to begin
    with.
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
    """Gradients travel as kept unless ``gradient_fp32_sync`` is off and nothing else asks for fp32."""
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
