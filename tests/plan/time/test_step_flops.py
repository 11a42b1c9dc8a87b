"""The operations of a step are those of its products, counted once per sample in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.planner.plan_job import plan_job
from tests.parity import job

ROOT = Path(__file__).parents[3]
SAMPLES, TIME, DIM, LAYERS, VOCABULARY, FFN = 8, 8, 16, 4, 64, 64
MEGATRON = {
    k: v for k, v in yaml.safe_load((ROOT / "conf/operators/megatron.yaml").read_text()).items() if k != "defaults"
}
LAYOUTS = {
    "one process": {},
    "micro batches": {"pipeline": {"micro_batch_num": 4}},
    "2 stages, 2 replicas": {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}},
    "sharded": {"hsdp": {"shard_size": 2, "threshold": 0}},
    "tensor parallel": {"operators": MEGATRON, "grid": {"tp": 2}},
    "tensor parallel but the head": {
        "operators": {k: v for k, v in MEGATRON.items() if k != "head"},
        "grid": {"tp": 2},
    },
    "pieces": {"pipeline": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2}},
    "recomputed": {"recompute": {"modules": "layers.*"}},
}


def by_hand() -> int:
    """Return three times the flops of a forward.

    A token takes two per weight of each product, plus the scores and sums of attention.
    """
    weights = LAYERS * (4 * DIM * DIM + 3 * DIM * FFN) + DIM * VOCABULARY
    attention = LAYERS * 2 * 2 * TIME * DIM
    return 3 * SAMPLES * TIME * (2 * weights + attention)


@pytest.mark.parametrize(
    "layout", ["one process", "micro batches", "2 stages, 2 replicas", "sharded", "tensor parallel", "recomputed"]
)
def test_a_layout_does_not_change_how_much_is_computed(layout: str) -> None:
    plan = plan_job(job(model__ffn_dim=FFN, parallel=LAYOUTS[layout]))
    assert plan.estimate.flops == by_hand()


def test_a_product_that_every_rank_of_tp_does_counts_on_each() -> None:
    plan = plan_job(job(model__ffn_dim=FFN, model__tied=False, parallel=LAYOUTS["tensor parallel but the head"]))
    head = 3 * SAMPLES * TIME * 2 * DIM * VOCABULARY
    assert plan.estimate.flops == by_hand() + head


def test_pieces_of_a_sequence_need_less_attention_than_all_of_it() -> None:
    """The first half does not attend to the second: causal attention skips that quarter."""
    plan = plan_job(job(model__ffn_dim=FFN, parallel=LAYOUTS["pieces"]))
    attention = 3 * SAMPLES * TIME * LAYERS * 2 * 2 * TIME * DIM
    assert by_hand() - attention // 2 <= plan.estimate.flops < by_hand()
