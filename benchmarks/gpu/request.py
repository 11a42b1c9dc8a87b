"""The request that is trained: a Llama of 1.1B parameters on a device, or a tiny one in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.lab import PartContext
from launcher.job.compose import compose
from launcher.job.schema.data import RandomTokens
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job

ALWAYS = (
    "recipe=lm_single", "data=random_tokens", "model.tied=false", "steps=[train]", "train.precision=bf16",
    "optim.lr=1e-4",
)  # fmt: skip
# TinyLlama's shape: 1.1 billion parameters, four micro batches of 8192 tokens
LLAMA_1B = (
    "data.vocab_size=32000", "data.seq_len=2048", "model.dim=2048", "model.layers=22", "model.heads=32",
    "model.kv_heads=4", "model.ffn_dim=5632", "train.batch_size=16", "parallel.pipeline.micro_batch_num=4",
)  # fmt: skip
TINY_LM = (
    "data.vocab_size=128", "data.seq_len=16", "model.dim=32", "model.layers=2", "model.heads=4",
    "model.kv_heads=2", "model.ffn_dim=64", "train.batch_size=4", "parallel.pipeline.micro_batch_num=2",
)  # fmt: skip
FULL = "parallel.recompute={modules: layers.*, policy: full}"
SELECTIVE = "parallel.recompute={modules: layers.*, policy: selective}"
COMPILE = "train.compile={modules: layers.*, backend: BACKEND}"
ONE_MICRO = "parallel.pipeline.micro_batch_num=1"
"""The batch is one micro batch: gradients are not accumulated, and weights are cast once.

With compiled blocks, its plan needs 65 of an H100's 76 GB.
"""


@dataclass(frozen=True)
class Shape:
    """The model and its batch, as a hand-written loop needs them."""

    vocabulary: int
    time: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    micros: int

    @property
    def head(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch * self.time


def backend(context: PartContext) -> str:
    """The backend of ``torch.compile``; a dry run avoids inductor, which takes too long on a CPU."""
    return "aot_eager" if context.dry else "inductor"


def words(context: PartContext, *more: str) -> list[str]:
    """The overrides of a request."""
    size = TINY_LM if context.dry else LLAMA_1B
    return [*ALWAYS, *size, *(w.replace("BACKEND", backend(context)) for w in more)]


def planned(context: PartContext, *more: str) -> tuple[Job, Plan]:
    job = compose(words(context, *more)).job
    return job, plan_job(job)


def shape(job: Job, plan: Plan) -> Shape:
    model, data = job.model, job.data
    assert isinstance(model, LanguageModel)
    assert isinstance(data, RandomTokens)
    assert data.vocab_size is not None
    assert model.kv_heads is not None
    assert model.ffn_dim is not None
    return Shape(
        vocabulary=data.vocab_size,
        time=data.seq_len,
        dim=model.dim,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn_dim,
        batch=job.train.batch_size,
        micros=plan.sizes.micros,
    )
