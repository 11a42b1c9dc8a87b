"""Planned bytes of activations, compared with those of arXiv 2205.05198, figures 1 and 7 (Korthikanti et al.).

The paper counts what the layers of the first pipeline stage keep for all micro batches in flight. It counts nothing for
the embedding, for messages, or for what a backward needs while it runs. ``Timeline.peak`` counts the same. It also
counts tensors that are in no formula of the paper: logits if there is one stage, means and deviations of norms, and
causal masks. With sequence parallelism, the paper keeps the inputs of linear layers sharded and gathers them again in
the backward; here the layers that gather are recomputed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict.requests import GATHERING, GPT, SEQUENCE_PARALLEL, TP_WEIGHTS
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.tiers import ALL

TABLE = (Path(__file__).parents[2] / "golden/korthikanti.csv").read_text()
ROWS = list(csv.DictReader(TABLE.splitlines()))
SMALL = [r for r in ROWS if r["model"] == "megatron-22B"]
LARGE = [r for r in ROWS if r not in SMALL]
TRIED = [*SMALL, *(LARGE if ALL else [])]
LENGTH, VOCABULARY = 2048, 51200
AGAIN = {
    "none": (), "none+sp": GATHERING, "selective": ("layers.*.attn.core",),
    "selective+sp": ("layers.*.attn.core", *GATHERING), "full": ("layers.*",),
}  # fmt: skip


def job_of_row(row: dict[str, str], recompute: str) -> Job:
    """The row's model and layout, with as many micro batches as can be in flight."""
    layers, pp, chunks = (int(row[key]) for key in ("layers", "pp", "vpp"))
    micros = 1 if pp == 1 else pp * min(chunks, 2)
    pipeline = {"stages": pp, "micro_batch_num": micros, "interleave": chunks > 1, "chunks": max(chunks, 2)}
    return job(
        model={
            "_target_": GPT, "vocab": VOCABULARY, "dim": int(row["hidden"]), "layers": layers,
            "heads": int(row["heads"]), "length": LENGTH,
        },
        data={"_target_": "tests.parallel.sources.Shapes", "shapes": [["int64", LENGTH]], "target": [LENGTH]},
        security__allow=("tests", "benchmarks"),
        train={"steps": 1, "batch_size": micros * int(row["micro_batch"]), "precision": "fp16"},
        parallel={
            "grid": {"tp": int(row["tp"])},
            "operators": TP_WEIGHTS | (SEQUENCE_PARALLEL if recompute.endswith("+sp") else {}),
            "pipeline": pipeline | ({} if pp == 1 else {"stage_config": dict(_stages(layers, pp * chunks))}),
            "recompute": {"modules": list(AGAIN[recompute])} if AGAIN[recompute] else None,
        },
    )  # fmt: skip


def _stages(layers: int, virtual: int) -> Iterator[tuple[str, int]]:
    """Put the same number of layers on each stage."""
    yield from dict.fromkeys(("embed", "position", "scaled"), 0).items()
    yield from ((f"layers.{n}", n * virtual // layers) for n in range(layers))
    yield from dict.fromkeys(("norm", "head"), virtual - 1).items()


@pytest.fixture(scope="module")
def kept() -> Any:
    """Return a function from a row and a recomputation to bytes, which plans each of them once."""
    known: dict[tuple[str, str], int] = {}

    def of(row: dict[str, str], recompute: str) -> int:
        key = (row["model"], recompute)
        if key not in known:
            known[key] = plan_job(job_of_row(row, recompute)).estimate.timeline.peak[0]
        return known[key]

    return of


@pytest.mark.parametrize("row", TRIED, ids=lambda r: "-".join((r["model"], r["recompute"], r["metric"][11:])))
def test_planned_activations_are_within_5_percent_of_the_literature(kept, row):
    planned = kept(row, row["recompute"])
    if row["metric"] == "activation_memory":
        planned /= 2**30
    else:
        planned *= 100 / kept(row, "none")
    assert planned == pytest.approx(float(row["value"]), rel=0.05)
