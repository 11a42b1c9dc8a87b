"""Builds the request that trains the model of a row in the layout of that row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from benchmarks.predict.rows import Row, UnusableRow
from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.job.schema.job import Job

GPT = "benchmarks.predict.gpt.GPT"
TP_WEIGHTS: dict[str, Any] = {
    "embed": {"weight": ["tp", None]}, "layers.*.attn.qkv": {"weight": ["tp", None]},
    "layers.*.attn.out": {"weight": [None, "tp"]}, "layers.*.up": {"weight": ["tp", None]},
    "layers.*.down": {"weight": [None, "tp"]}, "head": {"weight": ["tp", None]},
}  # fmt: skip
PART = ["dp", "tp", None]
SEQUENCE_PARALLEL: dict[str, Any] = {
    **{name: {"input": PART, "output": PART} for name in ("scaled", "layers.*.norm[12]", "norm")},
    **{name: TP_WEIGHTS[name] | {"output": PART} for name in ("layers.*.attn.out", "layers.*.down")},
}
GATHERING = ("layers.*.attn.qkv", "layers.*.up")
"""Modules whose inputs Megatron keeps sharded, and gathers again in the backward.

Here these modules are recomputed, which gathers their inputs again.
"""
RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("layers.*.attn.core",),
    "full": ("layers.*",),
}
NODE = 8
"""Devices per node, in all of these tables."""
GPUS = {"A100": "a100_80g", "H100": "h100_sxm"}


def request(row: Row) -> Job:
    """Return the request of ``row``.

    Raises ``UnusableRow``, and ``RequestError`` for settings that do not fit.
    """
    nodes, rest = divmod(row.ranks, NODE)
    if rest and nodes:
        raise UnusableRow(f"{row.ranks} devices are not a multiple of the {NODE} of a node")
    own = {} if row.gated else {"security": {"allow": ["benchmarks"]}}
    return Job.model_validate({
        "name": "predict",
        "cluster": cluster(row),
        "model": _llama(row) if row.gated else _gpt(row),
        "data": _tokens(row),
        "optim": {"name": "adamw"},
        "schedule": {"name": "constant"},
        "train": {"steps": 1, "batch_size": row.batch, "precision": row.precision},
        "launch": {"nproc": NODE if nodes else row.ranks, "nnodes": max(1, nodes)},
        "parallel": {
            "grid": {"tp": row.tp},
            "operators": _operators(row),
            "hsdp": None if row.zero == 0 or row.dp == 1 else _hsdp(row),
            "pipeline": _pipeline(row),
            "recompute": {"modules": list(_recomputed(row))} if _recomputed(row) else None,
        },
    } | own)  # fmt: skip


def cluster(row: Row) -> Cluster:
    """Return the cluster of ``conf/cluster`` with the GPU of ``row``. Raises ``UnusableRow`` without one."""
    gpu = row.raw["gpu"]
    for name, option in GPUS.items():
        if gpu.startswith(name):
            return option_of(f"cluster={option}").cluster
    raise UnusableRow(f"gpu {gpu}: conf/cluster has no such device")


@cache
def option_of(*overrides: str) -> Job:
    """Return the job of the default recipe with ``overrides``."""
    return compose(overrides).job


def _tokens(row: Row) -> dict[str, Any]:
    size = {"vocab_size": _vocab(row), "seq_len": row.seq, "samples": 2 * row.batch}
    return {"name": "random_tokens"} | size


def _hsdp(row: Row) -> dict[str, Any]:
    return {"shard_size": row.dp, "optimizer_level": f"level{row.zero}"}


def _operators(row: Row) -> Any:
    if row.tp == 1:
        return {}
    if row.gated:
        return option_of("operators=sequence").parallel.operators
    return TP_WEIGHTS | (SEQUENCE_PARALLEL if _fused(row) or row.recompute.endswith("+sp") else {})


def _recomputed(row: Row) -> tuple[str, ...]:
    kind = row.recompute.split("+")[0]
    if kind not in RECOMPUTED or (row.gated and kind == "selective"):
        raise UnusableRow(f"recompute {row.recompute}: it stands for no modules of {row.raw['model']}")
    return (*RECOMPUTED[kind], *(GATHERING if row.recompute.endswith("+sp") else ()))


def _pipeline(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {"stages": row.pp, "micro_batch_num": row.micros}
    if row.vpp > 1:
        out |= {"interleave": True, "chunks": row.vpp}
    if row.pp > 1:
        out |= {"scheduler": "1f1b"}
        stages = dict(_stages(row))
        if len(set(stages.values())) == row.pp * row.vpp:  # if one is empty, the planner chooses
            out |= {"stage_config": stages}
    return out


def _stages(row: Row) -> Iterator[tuple[str, int]]:
    """Yield the stage of each module: layers in equal shares, or in the division of nanotron."""
    first, last = ("embed", *(() if row.gated else ("position", "scaled"))), ("norm", "head")
    stages = row.pp * row.vpp
    if row.layers < stages:
        raise UnusableRow(f"{row.layers} layers for {stages} stages")
    yield from dict.fromkeys(first, 0).items()
    at = [n * stages // row.layers for n in range(row.layers)]
    if row.framework == "nanotron":
        at = _by_products(row)
    yield from ((f"layers.{n}", stage) for n, stage in enumerate(at))
    yield from dict.fromkeys(last, stages - 1).items()


def _by_products(row: Row) -> list[int]:
    """Return the stage of each layer in the division of nanotron.

    It balances the elements of the matrices of layers and head; the embedding counts nothing.
    """
    kv = row.hidden * row.kv_heads // row.heads
    block = 2 * row.hidden * (row.hidden + kv) + 3 * row.hidden * row.ffn
    total = row.layers * block + row.hidden * row.vocab
    out, stage = list[int](), 0
    for n in range(row.layers):
        while stage < row.pp - 1 and (n + 0.5) * block > total * (stage + 1) / row.pp:
            stage += 1
        out.append(stage)
    return out


def _llama(row: Row) -> dict[str, Any]:
    return {
        "name": "lm", "vocab_size": row.vocab, "dim": row.hidden, "layers": row.layers, "heads": row.heads,
        "kv_heads": row.kv_heads, "ffn_dim": row.ffn, "tied": row.tied, "rope_theta": 500000.0,
    }  # fmt: skip


def _gpt(row: Row) -> dict[str, Any]:
    return {
        "_target_": GPT, "vocab": _vocab(row), "dim": row.hidden, "layers": row.layers, "heads": row.heads,
        "kv_heads": row.kv_heads, "ffn": row.ffn, "length": row.seq, "fused": _fused(row),
    }  # fmt: skip


def _fused(row: Row) -> bool:
    """Return true if attention is one kernel, as in Megatron since 2023."""
    return row.framework == "megatron" and not row.raw["source"].startswith("korthikanti")


def _vocab(row: Row) -> int:
    """Return the size of the vocabulary, padded as Megatron pads it so that tp can cut the embedding."""
    step = 1 if row.gated else 128 * row.tp
    return -(-row.vocab // step) * step
