"""Settings as the plan decided them: precision, recomputation, compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.job.schema.job import Job
from launcher.plan.values.dtypes import COMPUTE, DTYPE

Status = Literal["applied", "satisfied", "degraded"]

Outcome = tuple[Status, str]
"""The status of a setting, and the reason for it."""

ALONE = "one data-parallel rank, nothing to sum or to gather"


@dataclass(frozen=True)
class Setting:
    """A setting that is not at its default, its status, and the reason for it."""

    key: str
    value: str
    status: Status
    why: str


BY_OPERATION = ("random",)
"""Kinds whose results dispatch modes keep operation by operation, which is slower in eager code.

The second run skips no call because of them; it only takes the kept numbers instead of drawing new ones.
"""


@dataclass(frozen=True)
class Recomputed:
    """``module``, by its name in the model, runs again in its backward instead of saving its activations.

    ``keep``: kinds of operations (``Recompute.keep``) whose results are kept; none with policy full.
    ``comm``: the second run repeats the collectives of operators over tp; otherwise their results are kept.
    ``restored``: buffers that its forward changes, by their names inside of it: their values are restored
    after the second run.
    """

    module: str
    keep: tuple[str, ...] = ()
    comm: bool = True
    restored: tuple[str, ...] = ()

    @property
    def by_operation(self) -> tuple[str, ...]:
        """The kinds of ``keep`` because of which all kept results are kept operation by operation."""
        return tuple(kind for kind in self.keep if kind in BY_OPERATION)

    @property
    def policy(self) -> str:
        return "selective" if self.keep else "full"


INDUCTOR = "inductor"
STAGE = ""
"""Stands for each whole stage in ``Compilation.modules``."""


@dataclass(frozen=True)
class Compilation:
    """The modules that are compiled, each by itself, and the arguments of ``torch.compile``.

    ``modules`` are names in the model; ``STAGE`` stands for every stage as a whole. ``fullgraph``: each
    module has to be one graph, or the run fails; otherwise the parts that torch cannot compile run eagerly.
    ``dynamic``: ``None`` leaves the choice to torch. ``timeout_s``: how long, in seconds, ranks wait for each
    other in the first step, which compiles. ``loss``: the training loss is compiled too, on the ranks that
    compute it.
    """

    modules: tuple[str, ...]
    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool | None
    timeout_s: float
    loss: bool = False

    @property
    def joins(self) -> bool:
        """Whether the backend fuses kernels; those other than inductor may run each operation by itself."""
        return self.backend == INDUCTOR


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
