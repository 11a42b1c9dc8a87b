"""Settings of each verb below ``steps``.

A new verb needs a class here, which is also in the union ``Step``, a file in ``conf/steps``, a row in
``launcher.plan.verbs`` and a file in ``launcher.steps``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from launcher.job.schema.base import Count, Flag, Many, Number, Ranks, Settings
from launcher.job.schema.cluster import Precision
from launcher.job.schema.data import Paths
from launcher.job.schema.paths import RUN, FilePath, checked


class Train(Settings):
    kind: Literal["train"] = "train"


Weights = Literal["trained", "ema"]
"""The weights of the last step, or their moving average (``train.ema``)."""


class Evaluate(Settings):
    """Validates a model: ``run`` is the live model on its ranks, ``exported`` the file, in one process."""

    kind: Literal["evaluate"] = "evaluate"
    of: Literal["run", "exported", "transformed"] = "run"
    weights: Weights = "trained"
    batches: Count | None = Field(None, description="null: all held-out samples")


class Predict(Settings):
    """Writes the model's outputs for samples, in their order, in the layout of the run."""

    kind: Literal["predict"] = "predict"
    inputs: FilePath | None = Field(
        None, description="safetensors file, one tensor per input of the model; null: held-out samples"
    )
    to: FilePath = Field("run:predictions.safetensors", description="the file, .safetensors or .jsonl")
    batches: Count | None = Field(None, description="null: all samples")

    @field_validator("to")
    @classmethod
    def _names_a_file(cls, to: str) -> str:
        if not to.endswith((".safetensors", ".jsonl")):
            raise ValueError("should be NAME.safetensors or NAME.jsonl, or run:NAME in the run folder")
        return checked(to)


class SyncShared(Settings):
    kind: Literal["sync_shared"] = "sync_shared"


class Save(Settings):
    kind: Literal["save"] = "save"


class Load(Settings):
    kind: Literal["load"] = "load"
    path: FilePath | None = Field(
        None, description="a checkpoint folder (step-NNNNNN) of any layout; null: the run's last"
    )
    broadcast: Flag = Field(False, description="each piece is read by one rank and broadcast to its replicas")


class Broadcast(Settings):
    kind: Literal["broadcast"] = "broadcast"


class Certify(Settings):
    """Trains a small copy of the run in its layout and in one process, and compares all numbers.

    If the run has another precision than ``precision``, it does so again in the run's precision.

    ``tolerance`` null: 1e-12 in fp64, 1e-6 in fp32; in half precision 8 roundings, or 1e-6 if rounding cannot
    differ.
    """

    kind: Literal["certify"] = "certify"
    steps: Count = 2
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp64"
    tolerance: Number | None = Field(
        None, gt=0, description="largest error, relative to each tensor's largest number"
    )


class Calibrate(Settings):
    """Measures this machine. ``to``: the file to write, for ``cluster=``.

    ``seconds``: how long to measure, at least five rounds.
    """

    kind: Literal["calibrate"] = "calibrate"
    to: FilePath = "run:here.yaml"
    seconds: Number = Field(90.0, gt=0)
    spread: Number = Field(0.3, gt=0, description="nothing is written if a constant has a larger spread")

    @field_validator("to")
    @classmethod
    def _names_a_file(cls, to: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*\.yaml", to.removeprefix(RUN).rpartition("/")[2]):
            raise ValueError("should be a file NAME.yaml, or run:NAME.yaml in the run folder")
        return checked(to)


class MergeStrategies(Settings):
    """Merges strategy files. ``src``: a folder with one file per stage, ours or MindSpore's.

    ``form``: the format that is written.
    """

    kind: Literal["merge_strategies"] = "merge_strategies"
    src: FilePath | None = None
    dst: FilePath | None = None
    form: Literal["same", "ours", "protobuf", "json"] = "same"


class Transform(Settings):
    """Transforms the run's last checkpoint (or ``src``) to the layout of a strategy file or these sizes."""

    kind: Literal["transform"] = "transform"
    src: FilePath | None = Field(None, description="a checkpoint, or what import reads")
    src_strategy: FilePath | None = None
    dst: FilePath | None = None
    format: Literal["launcher", "safetensors", "ckpt"] = Field(
        "launcher", description="a checkpoint, or rank files"
    )
    prefix: str | None = Field(
        None, min_length=1, pattern=r"^[^/\\\x00]+$", description="prefix of the names of rank files"
    )
    strategy: FilePath | None = None
    nproc: Ranks = 1
    stages: Ranks = 1
    shard_size: Ranks = 1
    tp: Ranks = 1
    workers: Many = 1
    overwrite: Flag = False


NameTable = Literal["llama"] | dict[str, str | None]


class Export(Settings):
    """Writes one safetensors file, or a Hugging Face folder, with full tensors.

    ``check`` evaluates it in one process and compares the loss with that of the run.
    """

    kind: Literal["export"] = "export"
    src: FilePath | None = None
    weights: Weights = "trained"
    path: FilePath | None = None
    format: Literal["safetensors", "hf"] | None = Field(
        None, description="null: hf for model=hf, else safetensors"
    )
    names: NameTable | None = Field(None, description="{our name: their name}; null: unchanged")
    max_shard_size: str = "5GB"
    beside: tuple[FilePath, ...] = ()
    overwrite: Flag = False
    dtype: Precision | None = Field(
        None,
        description="dtype of floating-point weights; null: the folder's for model=hf, else as trained",
    )
    lora: Literal["merged", "separate"] = Field(
        "merged",
        description="adapters are added to their base weights, or written alone as PEFT does",
    )
    check: Flag = True
    tolerance: Number | None = Field(
        None,
        gt=0,
        description="largest loss difference; null: 1e-5, or a rounding of merged half-precision weights",
    )


class Import(Settings):
    """Imports weights of another program as the checkpoint of step 0, in the run's layout."""

    kind: Literal["import"] = "import"
    src: FilePath = Field(
        description="a Hugging Face or torch DCP folder, MindSpore's rank folders, or one file"
    )
    strategy: FilePath | None = None
    names: NameTable | None = Field(None, description="{their name: our name}; null: unchanged")
    strict: Flag = True


class Verify(Settings):
    """Checks digests, and that the shards of every tensor are complete."""

    kind: Literal["verify"] = "verify"
    src: FilePath | None = None


class Inspect(Settings):
    """Prints a table of the tensors that each rank has."""

    kind: Literal["inspect"] = "inspect"
    src: FilePath | None = None


class Sample(Settings):
    kind: Literal["sample"] = "sample"
    prompt: str = "\n"
    tokens: Count = 200
    temperature: Number = Field(0.8, ge=0)


class Prepare(Settings):
    """Tokenizes text to a folder of ``.tokens`` files, which ``data=tokens`` reads."""

    kind: Literal["prepare"] = "prepare"
    src: Paths = Field(description="a file, a folder of files, a pattern, or a list of them")
    dst: FilePath = Field(min_length=1, description="folder to make")
    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = Field(
        "auto", description="format of the files; auto: by their names"
    )
    field: str = Field("text", min_length=1, description="key of a JSON object, or column, of the text")
    documents: Literal["file", "line"] = Field("file", description="what is a document in plain text")
    tokenizer: Literal["file", "bpe", "bytes"] = "file"
    tokenizer_file: FilePath | None = Field(None, description="for tokenizer=file: a tokenizer.json")
    vocab_size: Annotated[int, Field(ge=257, strict=True)] | None = Field(
        None, description="for tokenizer=bpe, which is trained on the beginning of the text"
    )
    end_of_document: str | None = Field(
        None, min_length=1, description="token that ends each document; null: the tokenizer's eos_token"
    )
    on_bad: Literal["error", "skip"] = Field("error", description="for rows that are not JSON or not UTF-8")
    shard_tokens: Count = Field(
        1 << 26, description="least number of tokens in a file; a restart continues after complete files"
    )
    workers: Many | None = Field(None, description="processes; null: one per core")
    overwrite: Flag = False

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        others = "tokenizer=bpe trains a tokenizer of vocab_size tokens; tokenizer=bytes needs no file"
        if self.tokenizer == "file" and self.tokenizer_file is None:
            raise ValueError(f"tokenizer=file needs tokenizer_file, the path of a tokenizer.json; {others}")
        if self.tokenizer == "bpe" and self.vocab_size is None:
            raise ValueError("tokenizer=bpe needs vocab_size, the number of its tokens, 257 or more")
        if self.tokenizer != "file" and self.tokenizer_file is not None:
            raise ValueError(f"tokenizer={self.tokenizer} reads no tokenizer_file; tokenizer=file does")
        if self.tokenizer != "bpe" and self.vocab_size is not None:
            raise ValueError(
                f"tokenizer={self.tokenizer} has its own vocab_size; only tokenizer=bpe needs one"
            )
        if self.tokenizer == "bytes" and self.end_of_document is not None:
            raise ValueError("tokenizer=bytes ends a document with token 256; leave end_of_document out")
        return self


Step = Annotated[
    Annotated[Train, Tag("train")]
    | Annotated[Evaluate, Tag("evaluate")]
    | Annotated[Predict, Tag("predict")]
    | Annotated[SyncShared, Tag("sync_shared")]
    | Annotated[Save, Tag("save")]
    | Annotated[Load, Tag("load")]
    | Annotated[Broadcast, Tag("broadcast")]
    | Annotated[Certify, Tag("certify")]
    | Annotated[Calibrate, Tag("calibrate")]
    | Annotated[MergeStrategies, Tag("merge_strategies")]
    | Annotated[Transform, Tag("transform")]
    | Annotated[Export, Tag("export")]
    | Annotated[Import, Tag("import")]
    | Annotated[Verify, Tag("verify")]
    | Annotated[Inspect, Tag("inspect")]
    | Annotated[Sample, Tag("sample")]
    | Annotated[Prepare, Tag("prepare")],
    Discriminator(lambda v: v.get("kind") if isinstance(v, dict) else getattr(v, "kind", None)),
]


def named(steps: Any) -> Any:
    """Adds to each step without a ``kind`` the verb that it is named after.

    ``{train: {}}`` becomes ``{train: {kind: train}}``.
    """
    if not isinstance(steps, dict):
        return steps
    return {k: {"kind": k, **(v or {})} if isinstance(v, dict | None) else v for k, v in steps.items()}


def check_names(steps: dict[str, Any]) -> dict[str, Any]:
    """Refuses a name that cannot be part of a path: the outputs of a step are named after it."""
    for name in steps:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"should have names of letters, digits, '.', '_' and '-', not {name!r}")
    return steps
