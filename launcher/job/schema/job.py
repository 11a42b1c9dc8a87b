"""The job: a complete request as one frozen value, and its sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from launcher.errors import Problem
from launcher.job.schema.base import Count, Flag, Goal, Index, Many, Ranks, Settings, Size, Switch
from launcher.job.schema.cluster import Cluster
from launcher.job.schema.components import Data, Loss, Metric, Model, Optim, Schedule
from launcher.job.schema.launch import Drill, Kubernetes, Profiler
from launcher.job.schema.logger import Logger
from launcher.job.schema.objective import CrossEntropy, named_metrics
from launcher.job.schema.parallel import Parallel
from launcher.job.schema.paths import FilePath
from launcher.job.schema.search import AUTO, AXES, Search, Sweep, lifted
from launcher.job.schema.steps import Step, named, with_names
from launcher.job.schema.user_class import Target

OPERATORS = "parallel.operators"
"""Its candidates may be names of options, which are files."""


class Compile(Settings):
    """How modules are compiled. ``modules``: ``auto`` (the blocks), ``stages``, names or globs.

    Each module is compiled separately. ``dynamic`` null: torch's default, static at first. ``timeout_s``: for
    the first step, instead of ``launch.timeout_s``.
    """

    modules: str | tuple[str, ...] = "auto"
    backend: str = Field("inductor", min_length=1)
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: Flag = True
    dynamic: Flag | None = False
    timeout_s: float = Field(3600.0, gt=0)


class Ema(Settings):
    """A moving average: every ``every`` steps it becomes ``decay`` * average + (1 - ``decay``) * weights."""

    decay: float = Field(0.999, gt=0, lt=1)
    every: Count = 1


class EarlyStop(Settings):
    """Ends training after ``patience`` validations without an improvement of more than ``min_delta``."""

    metric: str = Field("val_loss", min_length=1)
    patience: Count = 3
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    goal: Goal = "min"


class Train(Settings):
    """Training. ``batch_size`` is global: samples per optimizer step over all ranks.

    With ``epochs`` instead of ``steps``, the planner, which opens the data, computes the steps.
    """

    steps: Count | None = None
    epochs: Count | None = Field(None, description="times that every sample is trained on")
    batch_size: Size
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    loss_scale: float | None = Field(
        None, gt=0, description="fp16 only; null: from 65536, halved at an overflow"
    )
    clip_norm: float | None = Field(1.0, gt=0)
    compile: Compile | None = None
    ema: Ema | None = None
    log_every: Count = 1
    eval_every: Count | None = Field(
        None, description="optimizer steps between validations; null: none while training"
    )
    eval_batches: Count | None = Field(
        None, description="global batches a validation reads; null: all held-out samples"
    )
    early_stop: EarlyStop | None = None

    @field_validator("epochs")
    @classmethod
    def _said_once(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        steps = info.data.get("steps", epochs)
        if epochs is None and steps is None and "steps" in info.data:
            text = "this or train.epochs says how long to train, and neither is given"
            raise ValueError(f"train.steps=null: {text}")
        if None not in (epochs, steps) and "steps" in info.data:
            text = f"train.steps={steps} says how long to train already"
            raise ValueError(f"train.epochs={epochs}: {text}; use train.steps=null")
        return epochs


SlurmTime = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # minutes
    Field(pattern=r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})$"),
]


def _one_word(text: str) -> str:
    """Refuses spaces and line breaks: sbatch would read more options in a line, and bash lines of its own."""
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise ValueError("should be one word")
    return text


SlurmName = Annotated[str, AfterValidator(_one_word)]


class Slurm(Settings):
    """A Slurm job. Its nodes and ranks are those of ``launch``."""

    partition: SlurmName | None = None
    account: SlurmName | None = None
    time: SlurmTime | None = None
    gpus_per_node: Index | None = None
    cpus_per_task: Count | None = None
    signal_s: Count | None = Field(
        None, description="seconds before the end of its time that ranks save; null: as measured, else 300"
    )
    extra: tuple[str, ...] = Field((), description="more options of sbatch")
    setup: tuple[str, ...] = Field((), description="lines of bash before the ranks start")
    container: str | None = None
    array: Flag = Field(True, description="a sweep is an array; false: one allocation for all of its cells")
    array_parallel: Count | None = Field(
        None, description="cells of a sweep at a time; null: an array's all, an allocation's one"
    )
    submit: Flag = Field(True, description="false: write the batch file only")


NOT_NAMES = ("gpu", "gpus", "nvidia", "none", "null", "true", "false")


def _torch_name(name: str) -> str:
    """Accepts torch's names for devices and backends, but not common words for a GPU."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in NOT_NAMES:
        raise PydanticCustomError("torch_name", "should be a name that torch has, in lower case")
    return name


TorchName = Annotated[str, AfterValidator(_torch_name)]


class Launch(Settings):
    """How ranks start. ``nproc``: ranks per node; null: as many as the layout needs."""

    mode: Literal["auto", "spawn", "external", "inproc"] = "auto"
    nproc: Ranks | None = None
    nnodes: Ranks = 1
    backend: Literal["auto", "gloo", "nccl"] | TorchName = "auto"
    device: Literal["auto", "cpu", "cuda"] | TorchName = "auto"
    max_restarts: Index = 0
    elastic: Flag = Field(
        False, description="fewer ranks of torchrun than before: continue with those that are left"
    )
    timeout_s: float = Field(600.0, gt=0)
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="null: a free one, chosen by the system"
    )
    threads: Many = Field(1, description="CPU threads per rank")
    check_memory: Flag = Field(True, description="refuse what does not fit the memory of this machine")
    signal_save: Flag = Field(True, description="a signal that asks to stop: save a checkpoint first")
    slurm: Slurm | None = Field(None, description="a job of Slurm in place of ranks here")
    k8s: Kubernetes | None = Field(None, description="a job of Kubernetes, written in place of ranks here")


class Checkpoint(Settings):
    """Checkpoints. ``every``: optimizer steps between checkpoints during training; null: none.

    ``keep``: the number of newest checkpoints that are kept; null: all.
    """

    every: Count | None = None
    keep: Count | None = 2
    best: str | None = Field(
        None, min_length=1, description="a metric of validations: the best checkpoint is kept too"
    )
    best_goal: Goal = "min"
    format: Literal["safetensors"] = "safetensors"
    asynchronous: Flag = Field(False, alias="async")
    encrypt: str | None = None
    accept_plain: Flag = False
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="when there is no room for one while training"
    )
    accept_changes: tuple[str, ...] = ()
    resume: FilePath = "auto"


class Debug(Settings):
    """Debugging. ``limit``: train only this many steps. ``overfit``: repeat this many first samples.

    ``graphs``: draw what each stage runs into the run folder. ``drill``: a fault to inject. ``profiler``: the
    steps and ranks to profile.
    """

    limit: Count | None = None
    overfit: Count | None = None
    anomaly: Flag = False
    profiler: Annotated[Profiler | None, Switch] = None
    onerank: Flag = False
    graphs: Flag = False
    drill: Drill | None = None


class Security(Settings):
    """Which packages and files are trusted.

    ``recipe`` auto: files of the current folder and of --config-dir are trusted, others are not.
    """

    allow: tuple[str, ...] = ()
    recipe: Literal["auto", "trusted", "untrusted"] = "auto"


class Job(Settings):
    """A request. It computes nothing: the plan resolves ``null`` and ``-1`` and leaves a note.

    A job that is made in Python may have steps with settings that the schema does not list.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: Index = 0
    deterministic: Flag = False
    recipe: str | None = None
    runs: FilePath = "runs"
    run_dir: FilePath | None = None
    show: Literal["config", "plan", "plan-full", "timeline", "search"] | None = None
    model: Model
    data: Data
    loss: Loss = CrossEntropy()
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(named_metrics)] = ()
    optim: Optim
    schedule: Schedule
    train: Train
    parallel: Parallel = Parallel()
    search: Search = Search()
    sweep: Sweep = Sweep()
    launch: Launch = Launch()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    callbacks: tuple[Target, ...] = ()
    steps: Annotated[dict[str, SerializeAsAny[Step]], BeforeValidator(named), AfterValidator(with_names)] = {}
    logger: Logger = Logger()
    debug: Debug = Debug()
    security: Security = Security()

    @model_validator(mode="before")
    @classmethod
    def _searched(cls, data: Any) -> Any:
        """Moves candidates that are written at their key to ``search``."""
        return lifted(data) if isinstance(data, Mapping) else data

    def unfit(self) -> Iterator[Problem]:
        """Yields candidates of a search that their key does not accept."""
        for key, candidates in self.search.over.items():
            if key not in AXES or key == OPERATORS or not isinstance(candidates, tuple):
                continue
            bad = [c for c in candidates if c == AUTO or not _accepts(key, c)]
            if bad or not candidates:
                why = f"{bad[0]!r} is not a valid value of this key" if bad else "the list is empty"
                yield Problem(key, f"{list(candidates)!r}: {why}")


def _accepts(key: str, value: Any) -> bool:
    """Whether ``value`` alone is valid at ``key``, a setting of ``parallel``."""
    _, *parts = key.split(".")
    data = value
    for part in reversed(parts):
        data = {part: data}
    try:
        TypeAdapter(Parallel).validate_python(data)
    except ValidationError as error:
        return all(detail["loc"][: len(parts)] != tuple(parts) for detail in error.errors())
    return True
