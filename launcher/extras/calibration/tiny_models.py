"""Models so small that their steps are almost only overhead, for ``calibrate`` to train."""

from __future__ import annotations

from typing import Any

from launcher.job.schema.data import RandomTokens
from launcher.job.schema.debug import Debug
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.job.schema.objective import CrossEntropy
from launcher.job.schema.parallel import Parallel, Pipeline
from launcher.plan.certify_copy import Copy

VOCABULARY, LENGTH = 64, 16


def tiny_models(job: Job, ranks: int) -> tuple[Copy, Copy]:
    """Returns a copy of the job on ``ranks`` replicas, and one on ``ranks`` stages."""
    model = LanguageModel(name="lm", vocab_size=VOCABULARY, dim=32, layers=ranks, heads=2, tied=False)
    replicas, stages = Parallel(), Parallel(pipeline=Pipeline(stages=ranks, micro_batch_num=2 * ranks))
    update: dict[str, Any] = {
        "model": model,
        "data": RandomTokens(name="random_tokens", vocab_size=VOCABULARY, seq_len=LENGTH),
        "train": job.train.model_copy(
            update={"batch_size": 2 * ranks, "compile": None, "loss_scale": None, "eval_every": None}
        ),
        "checkpoint": job.checkpoint.model_copy(update={"every": None}),
        "loss": CrossEntropy(),
        "metrics": (),
        "debug": Debug(),
        "steps": {},
    }
    return (
        Copy(job.model_copy(update=update | {"parallel": replicas}), (), 0.0),
        Copy(job.model_copy(update=update | {"parallel": stages}), (), 0.0),
    )
