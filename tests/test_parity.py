"""Law 6: N ranks equal 1 rank. Loss, every gradient, every buffer and the norm, for all layouts that can run today."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest

from launcher.parallel import grad_norm, gradient_all_reduce, parallel_model, tied_parameters
from launcher.planner.plan_job import plan_job
from launcher.runtime.training import pipeline
from tests.parity import (
    LM,
    TOKENS,
    Run,
    accumulate,
    alone,
    assert_parity,
    batch,
    error,
    job,
    plain,
    rank_train,
    together,
    train_alone,
    under_layout,
    whole,
)
from tests.ranks import on_ranks
from tests.tiers import exhaustive, some

LEVELS = ("level1", "level2", "level3")
SCHEDULES: dict[str, dict[str, Any]] = {
    "single": {},
    "gpipe": {"stages": 2, "scheduler": "gpipe"},
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {"stages": 2, "interleave": True, "micro_batch_num": 4},
    "looped": {"stages": 2, "scheduler": "gpipe", "interleave": True},
    "zero_bubble_h1": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4},
    "zero_bubble_v": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4},
    "dualpipe_v": {"stages": 2, "scheduler": "dualpipe_v"},
    "less memory": {"stages": 2, "interleave": True, "less_memory": True, "micro_batch_num": 4},
}


def hsdp(size: int, level: str = "level1", threshold: int = 0) -> dict[str, Any]:
    return {"shard_size": size, "threshold": threshold, "optimizer_level": level}


DATA: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicate2": {"grid": {"dp_replicate": 2}},
    **{f"shard2_{level}": {"hsdp": hsdp(2, level)} for level in LEVELS},
}


SPLIT = ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
"""Schedules whose backward is split, which the planner refuses over level3."""
ELSEWHERE = ("gpipe", "1f1b", "interleaved", "looped", *SPLIT)
"""Schedules that the compatibility matrix measures in fp64, on one replica."""
CELLS = some(
    (s, d, tied, precision)
    for s, d, tied, precision in product(SCHEDULES, DATA, (True, False), ("fp64", "fp32"))
    if not (s in SPLIT and "level3" in d)
    and ((s == "single" or d == "plain") if precision == "fp32" else s not in ELSEWHERE or d == "replicate2")
)
"""In fp32, where only rounding differs: the plain layout of each schedule, and every layout without stages."""


@cache
def of_schedule(schedule: str) -> dict[Any, Run]:
    return together({
        (d, tied, precision): job(
            parallel={"pipeline": SCHEDULES[s], **DATA[d]}, model__tied=tied, train__precision=precision,
            model__layers=4 if precision == "fp64" else 2,
        )
        for s, d, tied, precision in CELLS if s == schedule
    })  # fmt: skip


@pytest.mark.parametrize(("schedule", "data", "tied", "precision"), CELLS)
def test_every_schedule_and_sharding_equals_one_process(schedule, data, tied, precision):
    of_schedule(schedule)[data, tied, precision].assert_same()


PIECES: dict[str, dict[str, Any]] = {
    "seqpipe": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 3, "micro_batch_num": 4},
    "seqpipe, interleaved": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2, "interleave": True},
    "seqvpp": {"stages": 2, "scheduler": "seqvpp", "seq_chunks": 2, "interleave": True, "micro_batch_num": 4},
    "seqsmartvpp": {"stages": 2, "scheduler": "seqsmartvpp", "seq_chunks": 2, "interleave": True, "micro_batch_num": 4},
}


PIECE_CELLS = some([
    ("seqpipe", "plain", False),
    *product(("seqpipe",), ("replicate2", "shard2_level1", "shard2_level2"), (True,)),
    *product(PIECES, ("plain", "shard2_level3"), (True,)),
], 3)  # fmt: skip
"""Cells with pieces of unequal lengths; equal ones without a tie are in the compatibility matrix."""


@cache
def in_pieces() -> dict[Any, Run]:
    return together({
        (s, d, tied): job(parallel={"pipeline": PIECES[s], **DATA[d]}, model__tied=tied, data__seq_len=11)
        for s, d, tied in PIECE_CELLS
    })  # fmt: skip


@pytest.mark.parametrize(("schedule", "data", "tied"), PIECE_CELLS)
def test_sequences_in_pieces_equal_one_process(schedule, data, tied):
    plan = in_pieces()[schedule, data, tied].assert_same()
    assert len(plan.pieces) == PIECES[schedule]["seq_chunks"]
    assert len(set(plan.pieces)) > 1


@pytest.mark.parametrize("split", ["balanced", pytest.param("equal", marks=exhaustive)])
def test_4_stages_of_4_pieces_with_grouped_heads_equal_one_process(split):
    pipe = {"stages": 4, "scheduler": "seqpipe", "seq_chunks": 4, "micro_batch_num": 8, "seq_split": split}
    plan, _ = assert_parity(job(parallel={"pipeline": pipe}, data__seq_len=64, model__heads=4, model__kv_heads=2,
                                model__dim=8, model__ffn_dim=8))  # fmt: skip
    assert plan.pieces == ((16, 16, 16, 16) if split == "equal" else (22, 16, 14, 12))


def test_pieces_in_fp32_equal_one_process():
    pipe = {"stages": 2, "scheduler": "seqvpp", "seq_chunks": 2, "interleave": True, "micro_batch_num": 4}
    assert_parity(job(parallel={"pipeline": pipe}, data__seq_len=11, train__precision="fp32"))


HSDP2X2 = {"hsdp": hsdp(2), "grid": {"dp_replicate": 2}}
ODD: dict[str, tuple[int, dict[str, Any]]] = {
    "interleaved, 3 micro batches": (3, {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 3}}),
    "interleaved, 5 micro batches": (5, {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 5}}),
    "looped, 3 micro batches": (
        3, {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 3, "scheduler": "gpipe"}},
    ),
    "1f1b, 5 micro batches, level2": (10, {"pipeline": {"stages": 2, "micro_batch_num": 5}, "hsdp": hsdp(2, "level2")}),
    "4 stages": (8, {"pipeline": {"stages": 4}}),
    "4 stages, 6 micro batches": (6, {"pipeline": {"stages": 4, "micro_batch_num": 6}}),
    "4 stages, gpipe": (4, {"pipeline": {"stages": 4, "scheduler": "gpipe"}}),
    "3 stages of 2 chunks, 4 micro batches": (
        4, {"pipeline": {"stages": 3, "interleave": True, "micro_batch_num": 4}},
    ),
    "2 stages of 3 chunks": (4, {"pipeline": {"stages": 2, "interleave": True, "chunks": 3, "micro_batch_num": 4}}),
    "zero_bubble_h1, 4 stages, 6 micro batches": (
        6, {"pipeline": {"stages": 4, "micro_batch_num": 6, "scheduler": "zero_bubble_h1"}},
    ),
    "zero_bubble_v, 2 micro batches": (2, {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}}),
    "zero_bubble_v, 3 stages, 5 micro batches": (
        5, {"pipeline": {"stages": 3, "micro_batch_num": 5, "scheduler": "zero_bubble_v"}},
    ),
    "dualpipe_v, 3 stages, 7 micro batches": (
        7, {"pipeline": {"stages": 3, "micro_batch_num": 7, "scheduler": "dualpipe_v"}},
    ),
    "zero_bubble_v, replicate 2 x shard 2, level2, threshold": (
        16, {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}, **HSDP2X2,
             "hsdp": hsdp(2, "level2", threshold=3)},
    ),
    "threshold between small and large": (8, {"pipeline": {"stages": 2}, "hsdp": hsdp(2, threshold=3)}),
    "threshold between small and large, level3": (8, {"hsdp": hsdp(2, "level3", threshold=3)}),
    "everything below the threshold": (8, {"pipeline": {"stages": 2}, "hsdp": hsdp(2, threshold=64)}),
    "shard 4": (8, {"hsdp": hsdp(4, "level2")}),
    "replicate 2 x shard 2": (8, HSDP2X2),
    "replicate 2 x shard 2, level3, threshold": (8, HSDP2X2 | {"hsdp": hsdp(2, "level3", threshold=3)}),
    "2 stages, replicate 2 x shard 2": (8, {"pipeline": {"stages": 2}, **HSDP2X2}),
    "interleaved, replicate 2 x shard 2, level3, threshold": (
        12, {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 3}, **HSDP2X2,
             "hsdp": hsdp(2, "level3", threshold=3)},
    ),
}  # fmt: skip


ODD_IN_FP32 = (
    "4 stages, 6 micro batches", "dualpipe_v, 3 stages, 7 micro batches",
    "zero_bubble_v, replicate 2 x shard 2, level2, threshold", "threshold between small and large", "shard 4",
    "interleaved, replicate 2 x shard 2, level3, threshold",
)  # fmt: skip
ODD_CELLS = some([*product(ODD, ("fp64",)), *product(ODD_IN_FP32, ("fp32",))])


@cache
def odd() -> dict[Any, Run]:
    return together({
        (name, p): job(parallel=ODD[name][1], train={"steps": 1, "batch_size": ODD[name][0], "precision": p})
        for name, p in ODD_CELLS
    })  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), ODD_CELLS)
def test_odd_layouts_equal_one_process(name, precision):
    odd()[name, precision].assert_same()


def test_a_threshold_really_parts_small_from_large():
    samples, parallel = ODD["threshold between small and large"]
    plan, _ = assert_parity(job(parallel=parallel, train__batch_size=samples))
    assert {p.name: p.sharded for p in plan.params if "layers" not in p.name} == {
        "embed.weight": True, "norm.weight": False,
    }  # fmt: skip


RAGGED: dict[str, dict[str, Any]] = {
    "63 rows over 2": {"model": LM | {"vocab_size": 63}, "data": TOKENS | {"vocab_size": 63},
                       "parallel": {"pipeline": {"stages": 2}, "hsdp": hsdp(2)}},
    "63 rows over 2, level3, one stage": {"model": LM | {"vocab_size": 63}, "data": TOKENS | {"vocab_size": 63},
                                          "parallel": {"hsdp": hsdp(2, "level3")}},
    "5 rows over 4, one rank without": {"model": {"name": "tied_pair", "vocab_size": 5, "dim": 3},
                                        "data": TOKENS | {"vocab_size": 5}, "parallel": {"hsdp": hsdp(4)}},
    "3 rows over 2, tied over stages": {"model": {"name": "tied_pair", "vocab_size": 3, "dim": 3},
                                        "data": TOKENS | {"vocab_size": 3},
                                        "parallel": {"pipeline": {"stages": 2}, "hsdp": hsdp(2, "level2")}},
}  # fmt: skip


@pytest.mark.parametrize("changes", list(RAGGED.values()), ids=list(RAGGED))
def test_rows_that_do_not_divide_equal_one_process(changes):
    assert_parity(job(**changes))


MLP = {
    "model": {"name": "mlp", "features": 784, "hidden": 24}, "data": {"name": "mnist5k"},
    "parallel": {
        "pipeline": {
            "stages": 2, "micro_batch_num": 2,
            "stage_config": {"flatten": 0, "layer1": 0, "relu1": 0, "layer2": 1, "relu2": 1, "layer3": 1},
        },
        "hsdp": {},
    },
    "launch__nproc": 4,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_the_network_of_autoparallels_own_example_equals_one_process(precision):
    assert_parity(job(**MLP, train__precision=precision))


RESNET: dict[str, Any] = {
    "model": {"name": "resnet", "depth": 18, "width": 4, "channels": 1},
    "data": {"name": "mnist5k"},
    "parallel": {"pipeline": {
        "stages": 2, "stage_config": {"stem": 0, "layer1": 0, "layer2": 0, "layer3": 1, "layer4": 1, "fc": 1},
    }},
}  # fmt: skip


def test_batch_norm_in_a_pipeline_equals_one_process_that_accumulates_the_same_micro_batches():
    plan, got = assert_parity(job(**RESNET), parts=2)
    assert plan.sizes.micros == 2
    assert got.buffers["stem.1.num_batches_tracked"].item() == 2


def test_batch_norm_on_two_data_parallel_ranks_keeps_the_statistics_of_the_first():
    j = job(**RESNET, parallel__grid={"dp_replicate": 2})
    plan, got = under_layout(j)
    want = alone(j, plan, parts=4)
    assert max(error(got.grads[n], g) for n, g in want.grads.items()) <= 1e-12
    model = plain(j, plan)
    xs, y = batch(j, plan)
    accumulate(model, tuple(x[:4] for x in xs), y[:4], 2)
    assert max(error(got.buffers[n], b) for n, b in model.named_buffers()) <= 1e-12


@pytest.mark.parametrize(("reduction", "mean", "factor"), [("sum", True, 2), ("mean", False, 2), ("sum", False, 4)])
def test_sums_in_place_of_means_are_multiples_of_the_gradient(reduction, mean, factor):
    j = job(parallel={"pipeline": {"stages": 2, "loss_reduction": reduction}, "gradients_mean": mean,
                      "grid": {"dp_replicate": 2}})  # fmt: skip
    plan, got = under_layout(j)
    want = alone(j, plan)
    assert abs(got.loss - want.loss) <= 1e-12 * want.loss
    assert max(error(got.grads[n], factor * g) for n, g in want.grads.items()) <= 1e-12


TRAINED = {
    "2 stages": {"pipeline": {"stages": 2}},
    "interleaved x shard 2": {"pipeline": {"stages": 2, "interleave": True}, "hsdp": hsdp(2, "level3", threshold=3)},
    "replicate 2 x shard 2": HSDP2X2,
}


CLIPPED = {"clipped": 0.05, "not clipped": 1e9}


@pytest.mark.parametrize(("layout", "clip"), some(product(TRAINED, CLIPPED), 2))
def test_weights_after_20_clipped_steps_equal_one_process_and_all_copies_are_bit_equal(layout, clip):
    j = job(parallel=TRAINED[layout], optim={"name": "adamw", "lr": 1e-2})
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_train, j, plan, 20, CLIPPED[clip])
    got, want = whole(plan, [p for held in ranks for p in held]), train_alone(j, plan, 20, CLIPPED[clip])
    assert max(error(got[n], w) for n, w in want.items()) <= 1e-9  # 20 steps of AdamW amplify a rounding


TIED = job(parallel={"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}})


def caught(text: str) -> dict[str, float]:
    """Check that parity fails for the layout with everything, with ``text``; return the errors that it names."""
    with pytest.raises(AssertionError, match=text) as failed:
        assert_parity(TIED)
    return {name: float(e) for name, e in re.findall(r"'([\w.]+)': ([\d.e+-]+)", str(failed.value))}


TWICE = pytest.approx(1.0, rel=1e-9)
"""The error of a number that is twice that of one process; its last digits depend on the machine."""


def test_a_loss_scale_that_forgets_the_micro_batches_is_caught(monkeypatch):
    real = pipeline.PipelineRuntime.__init__

    def wrong(self, model, *args):
        real(self, model, *args)
        self.scale *= model.plan.sizes.micros

    monkeypatch.setattr(pipeline.PipelineRuntime, "__init__", wrong)
    off = caught(r"over 1e-12: \{'norm': ")
    assert len(off) > 20
    assert off == dict.fromkeys(off, TWICE)


def test_a_tied_gradient_that_is_added_twice_is_caught(monkeypatch):
    real = tied_parameters.Tied.reduce

    def wrong(self):
        real(self)
        real(self)

    monkeypatch.setattr(tied_parameters.Tied, "reduce", wrong)
    assert caught(r"over 1e-12: \{'norm': .*'embed\.weight': ")["embed.weight"] == TWICE


def test_a_tied_gradient_that_is_not_added_is_caught(monkeypatch):
    monkeypatch.setattr(tied_parameters.Tied, "reduce", lambda self: None)
    caught(r"embed\.weight: copies differ")


def test_a_norm_that_counts_replicas_twice_is_caught(monkeypatch):
    real = grad_norm.build

    def wrong(model):
        good = real(model)
        return grad_norm.Norm(tuple((t, 1.0) for t, _ in good.pieces), good.copies)

    monkeypatch.setattr(grad_norm, "build", wrong)
    off = caught(r"over 1e-12: \{'norm': ")
    assert list(off) == ["norm"]
    assert 2**0.5 - 1 < off["norm"] < 1  # replicas twice, the tied table four times


def test_a_bucket_that_skips_its_last_parameter_is_caught(monkeypatch):
    def wrong(part, plan, meshes):
        return [
            gradient_all_reduce.Bucketed(b.tensors[:-1], b.group)
            for b in gradient_all_reduce.data_parallel_buckets(part, plan, meshes)
        ]

    monkeypatch.setattr(parallel_model, "data_parallel_buckets", wrong)
    caught("copies differ")


def test_statistics_that_are_not_shared_are_caught(monkeypatch):
    monkeypatch.setattr(parallel_model, "statistics", lambda *_: parallel_model.Statistics((), None))
    with pytest.raises(AssertionError, match="copies differ"):
        assert_parity(job(**RESNET, parallel__grid={"dp_replicate": 2}), parts=4)
