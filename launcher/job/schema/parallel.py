"""Settings below ``parallel``, named as in MindSpore's AutoParallel."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from launcher.job.schema.base import Count, Flag, Index, Number, Ranks, Settings
from launcher.job.schema.paths import RUN, FilePath, checked, local

Scheduler = Literal[
    "gpipe",
    "1f1b",
    "zero_bubble_h1",
    "zero_bubble_v",
    "dualpipe_v",
    "seqpipe",
    "seqvpp",
    "seqsmartvpp",
    "auto",
]


def _positive(n: int) -> int:
    if n != -1 and n < 1:
        raise ValueError("must be -1 (all data-parallel ranks) or a positive integer")
    return n


def _named(value: Any) -> Any:
    """Turns an empty name, which is MindSpore's default, into ``None``: no file."""
    return None if value == "" else value


def _either_form(path: str) -> str:
    if not path.endswith((".json", ".ckpt")):
        raise ValueError("should end in .json or .ckpt")
    return path


def _there(path: str) -> str:
    if path.startswith(RUN):
        raise ValueError("should be the path of an existing file")
    return path


class _FileNameError(ValueError, KeyError):
    """MindSpore raises ``KeyError`` for such a file name; pydantic requires a ``ValueError``."""

    def __str__(self) -> str:
        return ValueError.__str__(self)


def _operators(path: str) -> str:
    if not path.startswith(("/", RUN)):
        raise _FileNameError("should be an absolute path")
    if not path.endswith(".json"):
        raise _FileNameError("should end in .json")
    return path


ShardSize = Annotated[int, Field(strict=True), AfterValidator(_positive)]
NewPath = Annotated[str, Field(min_length=1), AfterValidator(checked)]
NewJsonOrCkpt = Annotated[NewPath, AfterValidator(_either_form)]
NewAbsoluteJson = Annotated[NewPath, AfterValidator(_operators)]
OldPath = Annotated[str, Field(min_length=1), AfterValidator(local), AfterValidator(_there)]
OldAbsoluteJson = Annotated[OldPath, AfterValidator(_operators)]


class Pipeline(Settings):
    stages: Ranks = 1
    stage_config: Literal["auto"] | dict[str, Any] = Field("auto", description="{module name or glob: stage}")
    scheduler: Scheduler = "1f1b"
    interleave: Flag = False
    chunks: Ranks = Field(2, description="virtual stages per rank when interleave is on")
    less_memory: Flag = Field(
        False, description="interleaved 1f1b that runs ahead by one forward per rank, not two"
    )
    micro_batch_num: Ranks | None = Field(None, description="null: as many as stages")
    loss_reduction: Literal["mean", "sum"] = "mean"
    seq_chunks: Ranks = Field(1, description="pieces of a sequence, for the seq* schedulers")
    seq_split: Literal["balanced", "equal"] = Field(
        "balanced", description="pieces of equal cost, or equal length"
    )
    output_broadcast: Flag = False


class Hsdp(Settings):
    """Sharding. ``threshold``: KB of a full parameter; smaller ones are not sharded.

    ``shard_size`` -1: all data-parallel ranks. ``uneven``: how to treat a parameter whose dim 0 is no
    multiple of the number of shards.
    """

    shard_size: ShardSize = -1
    threshold: Index = 64
    optimizer_level: Literal["level1", "level2", "level3"] = "level1"
    uneven: Literal["pad", "whole"] = Field(
        "pad", description="pad: the last ranks hold less; whole: no shards"
    )


class Fusion(Settings):
    """How gradients or weights are fused. ``config``: MB for ``size``; null: 64."""

    mode: Literal["auto", "size"] = "auto"
    config: Annotated[Number, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _form(self) -> Self:
        if self.mode == "auto" and self.config is not None:
            raise ValueError(f"mode auto takes no config; for {self.config:g} MB: mode=size")
        return self


class FusionIndex(Settings):
    """How gradients are fused. ``config``: MB for ``size``; null: 64.

    For ``index``: ascending indices of trainable parameters.
    """

    mode: Literal["auto", "size", "index"] = "auto"
    config: Annotated[Number, Field(gt=0)] | tuple[Index, ...] | None = None

    @model_validator(mode="after")
    def _form(self) -> Self:
        if self.mode == "index":
            if not isinstance(self.config, tuple) or list(self.config) != sorted(set(self.config)):
                raise ValueError("mode index needs config: a list of ascending, distinct parameter indices")
        elif isinstance(self.config, tuple):
            raise ValueError(f"mode {self.mode} needs config: a size in MB, not a list")
        elif self.mode == "auto" and self.config is not None:
            raise ValueError(f"mode auto takes no config; for {self.config:g} MB: mode=size")
        return self


class Network(Settings):
    """A collective of n bytes takes ``latency_us`` + n / ``gb_per_s``.

    ``benchmarks/fusion.py --fit`` measures both.
    """

    latency_us: Number = Field(gt=0, description="microseconds until the first byte")
    gb_per_s: Number = Field(gt=0, description="1e9 bytes per second")


class CommFusion(Settings):
    """Fusion of collectives.

    ``network``: the speeds for which ``auto`` chooses sizes; null: 64 MB per all-reduce, a gather per block.
    """

    openstate: Flag = True
    allreduce: FusionIndex | None = None
    allgather: Fusion | None = None
    reducescatter: Fusion | None = None
    network: Network | None = None


RecomputePolicy = Literal["full", "selective"]
KeptOperation = Literal[
    "matmul", "batched_matmul", "attention", "convolution", "normalization", "activation", "random"
]


AUTO = "auto"


class Recompute(Settings):
    """Recomputation. ``modules``: names or globs, or {name or glob: policy}.

    Policy ``selective`` keeps the outputs of the operations in ``keep``.

    ``modules`` auto, or auto instead of this section, recomputes only as many blocks of each stage as it
    needs to fit in memory. ``every`` n: every n-th of the modules that match a glob, from the first.

    ``comm``: the backward repeats the forward's collectives over tp, or their results are kept.
    """

    modules: str | tuple[str, ...] | dict[str, RecomputePolicy]
    policy: RecomputePolicy = "full"
    keep: tuple[KeptOperation, ...] = ("matmul", "attention")
    every: Count = 1
    comm: Literal["recompute", "keep"] = "recompute"

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        if self.modules == AUTO and (self.policy != "full" or self.every != 1):
            raise ValueError(
                "modules auto chooses the blocks and the policy of each; leave out policy and every"
            )
        return self


def _modules(recompute: Any) -> Any:
    """Expands ``auto`` to ``{modules: auto}``."""
    return {"modules": AUTO} if recompute == AUTO else recompute


class Grid(Settings):
    pp: Ranks | None = None
    dp_replicate: Ranks | None = None
    dp_shard: Ranks | None = None
    tp: Ranks | None = None


class LocalNorm(Settings):
    print: Flag = False
    dump: NewPath | None = None
    device: Flag = False


class ParamStrategy(Settings):
    save: NewJsonOrCkpt | None = None
    load: OldPath | None = None
    only_trainable: Flag = True


class OperatorStrategy(Settings):
    """Files of operator strategies: absolute paths, as in MindSpore, or paths in the run folder."""

    save: NewAbsoluteJson | None = None
    load: OldAbsoluteJson | None = None


def _switches(values: dict[str, Any]) -> dict[str, Any]:
    """Checks switches by name; ``file`` names a file with the other switches."""
    file = values.get("file")
    if file is not None and not isinstance(file, str):
        raise ValueError("file should be the path of a parallel_speed_up.json")
    return values if file is None else {**values, "file": local(file)}


class Parallel(Settings):
    mode: Literal["semi_auto", "sharding_propagation", "recursive_programming"] = "semi_auto"
    pipeline: Pipeline = Pipeline()
    hsdp: Hsdp | None = None
    comm_fusion: CommFusion = CommFusion()
    operators: dict[str, Any] = {}
    recompute: Annotated[Recompute | None, BeforeValidator(_modules)] = None
    grid: Grid = Grid()
    dataset_strategy: (
        Literal["data_parallel", "full_batch"] | tuple[tuple[Count, ...], ...] | dict[str, Any]
    ) = "data_parallel"
    gradients_mean: Flag = True
    fp32_communication: Flag = False
    gradient_fp32_sync: Flag = True
    loss_repeated_mean: Flag = True
    local_norm: LocalNorm = LocalNorm()
    shared: Literal["auto"] | tuple[tuple[str, ...], ...] = "auto"
    param_strategy: ParamStrategy = ParamStrategy()
    operator_strategy: OperatorStrategy = OperatorStrategy()
    group_file: NewJsonOrCkpt | None = None
    transformer_opt: Annotated[
        FilePath | Annotated[dict[str, Any], AfterValidator(_switches)] | None, BeforeValidator(_named)
    ] = None
    deferred_init: Flag = True
