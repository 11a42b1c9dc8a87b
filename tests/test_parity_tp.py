"""Law 6 with operators split over ``tp``: loss, every gradient and the norm are those of one process."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from launcher.parallel.deferred_init import fill
from launcher.parallel.tensor_parallel import collectives
from launcher.planner.plan_job import plan_job
from tests.parity import Run, assert_parity, error, job, plain, rank_train, together, train_alone, whole
from tests.ranks import on_ranks
from tests.tiers import exhaustive, some

COLUMN: dict[str, Any] = {"weight": ["tp", None]}
ROW: dict[str, Any] = {"weight": [None, "tp"]}
TIME = ["dp", "tp", None]
MEGATRON = {
    "embed": COLUMN, "layers.*.attn.[qkv]": COLUMN, "layers.*.attn.o": ROW, "layers.*.mlp.gate": COLUMN,
    "layers.*.mlp.up": COLUMN, "layers.*.mlp.down": ROW, "head": COLUMN,
}  # fmt: skip
SEQUENCE = MEGATRON | {
    "embed": COLUMN | {"output": TIME},
    "layers.*.attn.o": ROW | {"output": TIME},
    "layers.*.mlp.down": ROW | {"output": TIME},
}
KINDS: dict[str, dict[str, Any]] = {
    "q, k, v and o": {"layers.*.attn.[qkv]": COLUMN, "layers.*.attn.o": ROW},
    "slices in MatMul's order": {
        "layers.*.mlp.[gu]*": {"in": [[1, 1, 1], [1, 2]]}, "layers.*.mlp.down": {"in": [[1, 1, 2], [2, 1]]},
    },
    "a device matrix": {
        "layers.*.mlp.[gu]*": {
            "layout": {"device_matrix": [1, 2], "alias_name": ["dp", "mp"]},
            "in": [["dp", "None", "None"], ["mp", "None"]], "out": [["dp", "None", "mp"]],
        },
        "layers.*.mlp.down": ROW,
    },
    "a column alone, gathered": {"layers.0.mlp.up": COLUMN | {"output": [None, None, None]}},
    "a row alone, sliced": {"layers.0.mlp.down": ROW},
    "vocabulary": {"embed": COLUMN},
    "hidden": {"embed": ROW | {"output": [None, None, None]}},
    "loss over the vocabulary": {"head": COLUMN},
    "logits gathered": {"head": COLUMN | {"output": ["dp", None, None]}},
    "norms on a part of the time": {
        "layers.*.*_norm": {"input": TIME, "output": ["dp", None, None]}, "norm": {"input": TIME},
        "head": {"output": ["dp", None, None]},
    },
    "a norm on a part of the samples": {"norm": {"input": [["dp", "tp"], None, None]}, "head": COLUMN},
}  # fmt: skip


KIND_CELLS = some(
    [
        *product(KINDS, ("fp64",)),
        *product(("q, k, v and o", "vocabulary", "loss over the vocabulary", "norms on a part of the time"), ("fp32",)),
    ]
)


@cache
def kinds() -> dict[Any, Run]:
    return together({
        (kind, p): job(parallel={"operators": KINDS[kind], "grid": {"tp": 2}}, model__tied=False, model__layers=2,
                       train__precision=p)
        for kind, p in KIND_CELLS
    })  # fmt: skip


@pytest.mark.parametrize(("kind", "precision"), KIND_CELLS)
def test_each_kind_alone_equals_one_process(kind, precision):
    kinds()[kind, precision].assert_same()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "2 stages": (4, {"pipeline": {"stages": 2, "micro_batch_num": 4}}),
    "interleaved": (4, {"pipeline": {"stages": 2, "interleave": True}}),
    "zero_bubble_v": (4, {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}}),
    "zero_bubble_h1": (4, {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1"}}),
    "replicate 2": (4, {"grid": {"tp": 2, "dp_replicate": 2}}),
    **{f"shard 2, {level}": (4, {"hsdp": {"threshold": 0, "optimizer_level": level}}) for level in
       ("level1", "level2", "level3")},
    "shard 2, threshold": (4, {"hsdp": {"threshold": 3}}),
    "2 x 2 x 2": (8, {"pipeline": {"stages": 2}, "hsdp": {"threshold": 0}}),
}  # fmt: skip


BOTH = {"megatron": MEGATRON, "sequence": SEQUENCE}
CELLS = some(
    [
        *product(LAYOUTS, BOTH, ("untied",)),
        *product(LAYOUTS, ("sequence",), ("tied",)),
        ("2 x 2 x 2", "megatron", "tied"),
    ]
)
"""Untied cells are in fp64, tied ones in fp32; both kinds of operators split the tie in the same way."""


@cache
def laid_out() -> dict[Any, Run]:
    return together({
        (layout, name, tied): job(
            parallel={"operators": BOTH[name], "grid": {"tp": 2}, **LAYOUTS[layout][1]}, model__tied=tied == "tied",
            launch={"nproc": LAYOUTS[layout][0]}, train__precision="fp32" if tied == "tied" else "fp64",
            model__layers=2,
        )
        for layout, name, tied in CELLS
    })  # fmt: skip


@pytest.mark.parametrize(("layout", "operators", "tied"), CELLS)
def test_the_language_model_in_every_layout_equals_one_process(layout, operators, tied):
    laid_out()[layout, operators, tied].assert_same()


ADAPTERS = {"rank": 3, "alpha": 6, "modules": ("layers.*.attn", "layers.*.mlp", "head")}
ADAPTED = some([*product(("tp2", "zero_bubble_h1", "shard 2, level3", "2 x 2 x 2"), BOTH)])


@pytest.mark.parametrize(("layout", "operators"), ADAPTED)
def test_adapters_beside_weights_that_are_cut_train_as_in_one_process(layout, operators):
    """It trains several steps, because the gradient of ``lora_A`` is zero in the first."""
    ranks, parallel = LAYOUTS[layout]
    j = job(
        parallel={"operators": BOTH[operators], "grid": {"tp": 2}, **parallel}, launch={"nproc": ranks},
        model__tied=False, model__layers=2, model__lora=ADAPTERS, optim={"name": "sgd", "lr": 0.5},
    )  # fmt: skip
    plan = plan_job(j)
    held = on_ranks(plan.sizes.grid.size, rank_train, j, plan, 3, timeout_s=120)
    got, want = whole(plan, [p for pieces in held for p in pieces]), train_alone(j, plan, 3)
    assert {n: e for n in want if not (e := error(got[n], want[n])) <= 1e-12} == {}
    before = {n: t.detach() for n, t in fill.tensors(plain(j, plan)).items()}
    assert {n for n in want if not torch.equal(want[n], before[n])} == {n for n in want if "lora" in n}


SEQPIPE = {"stages": 2, "micro_batch_num": 4, "scheduler": "seqpipe", "seq_chunks": 2}
PIECES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "seqpipe, megatron": (4, MEGATRON, {"pipeline": SEQPIPE}),
    "seqvpp, sequence, level3": (
        8, SEQUENCE,
        {"pipeline": SEQPIPE | {"scheduler": "seqvpp", "interleave": True},
         "hsdp": {"threshold": 0, "optimizer_level": "level3"}},
    ),
    "seqpipe, attention as one operator": (
        4, {"embed": {"output": TIME}, "layers.*.attn": {"input": ["dp", None, None], "output": TIME},
            "norm": {"output": ["dp", None, None]}},
        {"pipeline": SEQPIPE},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "operators", "rest"), some(PIECES.values()), ids=some(PIECES))
def test_sequences_in_pieces_equal_one_process(ranks, operators, rest):
    j = job(parallel={"operators": operators, "grid": {"tp": 2}, **rest}, launch={"nproc": ranks}, data__seq_len=10,
            model__tied=ranks == 8)  # fmt: skip
    plan, _ = assert_parity(j)
    assert plan.pieces == ((6, 4) if TIME in [v for o in operators.values() for v in o.values()] else (5, 5))


def test_four_ways_with_fewer_key_heads_equal_one_process():
    changes = {"model__heads": 8, "model__kv_heads": 4, "model__dim": 32}
    assert_parity(job(parallel={"operators": SEQUENCE, "grid": {"tp": 4}}, **changes))


def test_a_replicate_and_shard_grid_under_tp_equals_one_process():
    parallel = {"operators": SEQUENCE, "grid": {"tp": 2, "dp_replicate": 2}, "hsdp": {"shard_size": 2, "threshold": 0}}
    assert_parity(job(parallel=parallel, launch={"nproc": 8}))


@pytest.mark.parametrize("swap", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("hsdp", [None, {"threshold": 0}], ids=["whole", "sharded"])
def test_layers_with_bias_equal_one_process(hsdp, swap):
    """The bias of a row-parallel layer is added after the sum, or before it to the term of one rank."""
    mlp = {"name": "mlp", "features": 12, "hidden": 8, "classes": 4}
    operators = {"layer1": COLUMN, "layer2": ROW, "layer3": COLUMN}
    swapped = {"allreduce_and_biasadd_swap": swap}
    parallel = {"operators": operators, "grid": {"tp": 2}, "hsdp": hsdp, "transformer_opt": swapped}
    shapes = {"data": {"_target_": "tests.parallel.sources.Shapes", "shapes": [[12]]}, "security__allow": ("tests",)}
    j = job(model=mlp, parallel=parallel, launch={"nproc": 4 if hsdp else 2}, **shapes)
    said = [(s.status, s.why) for s in plan_job(j).settings if "biasadd" in s.key]
    assert said == [("applied", "the first rank of tp adds the bias to its term, before the all-reduce")] * swap
    assert_parity(j)


@exhaustive
def test_weights_after_20_clipped_steps_equal_one_process():
    parallel = {"operators": SEQUENCE, "grid": {"tp": 2}, "pipeline": {"stages": 2}, "hsdp": {"threshold": 3}}
    j = job(parallel=parallel, launch={"nproc": 8}, optim={"name": "adamw", "lr": 1e-2})
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_train, j, plan, 20, 0.05)
    got, want = whole(plan, [p for held in ranks for p in held]), train_alone(j, plan, 20, 0.05)
    assert max(error(got[n], w) for n, w in want.items()) <= 1e-9


def caught(text: str, operators: dict[str, Any] = SEQUENCE) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_parity(job(parallel={"operators": operators, "grid": {"tp": 2}}))


def test_a_gradient_that_is_not_summed_where_it_enters_is_caught(monkeypatch):
    monkeypatch.setattr(collectives._Enter, "backward", staticmethod(lambda ctx, grad: (grad, None)))
    caught(r"copies differ|over 1e-12", MEGATRON)


def test_a_sum_that_is_also_summed_backward_is_caught(monkeypatch):
    real = collectives._Leave.forward

    def forward(ctx, x, axis):
        ctx.axis = axis
        return real(ctx, x, axis)

    monkeypatch.setattr(collectives._Leave, "forward", staticmethod(forward))
    monkeypatch.setattr(collectives._Leave, "backward", staticmethod(lambda ctx, grad: (ctx.axis.sum(grad), None)))
    caught(r"over 1e-12", MEGATRON)
