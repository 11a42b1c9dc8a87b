"""Recomputation does not change the numbers: gradients with and without it are equal to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.job.schema.cluster import Cluster
from launcher.job.schema.job import Job
from launcher.parallel.recompute import install
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.plan import Plan
from launcher.plan.values.recomputed_module import Recomputed
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.compare import Piece
from tests.parallel.counting import assert_as_planned, rank_counts
from tests.parity import assert_parity, error, job, own, rank_step
from tests.ranks import on_ranks
from tests.test_parity_tp import MEGATRON, SEQUENCE
from tests.tiers import some, some_of

FULL: dict[str, Any] = {"modules": "blocks.*"}
SELECTIVE = FULL | {"policy": "selective"}
WAYS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "dropout kept": SELECTIVE | {"keep": ["random"]},
    "every other": FULL | {"every": 2},
    "matmul and attention kept": SELECTIVE,
    "parts": {"modules": {"blocks.*.attn": "full", "blocks.*.up": "selective"}},
}


def hsdp(level: str) -> dict[str, Any]:
    return {"hsdp": {"threshold": 0, "optimizer_level": level}, "grid": {"dp_shard": 2}}


PIPE: dict[str, Any] = {"stages": 2, "micro_batch_num": 4}
PIECES = PIPE | {"seq_chunks": 4}
WHOLE: dict[str, tuple[int, dict[str, Any]]] = {
    "one stage": (1, {"pipeline": {"micro_batch_num": 2}}),
    **{f"one stage, {level}": (2, hsdp(level)) for level in ("level1", "level2", "level3")},
    "1f1b": (2, {"pipeline": PIPE}),
    **{f"1f1b, {level}": (4, {"pipeline": PIPE, **hsdp(level)}) for level in ("level1", "level2", "level3")},
    "gpipe": (2, {"pipeline": PIPE | {"scheduler": "gpipe"}}),
    "interleaved": (2, {"pipeline": PIPE | {"interleave": True}}),
    "seqpipe": (2, {"pipeline": PIECES | {"scheduler": "seqpipe"}}),
    **{s: (2, {"pipeline": PIECES | {"scheduler": s, "interleave": True, "seq_chunks": 2}})
       for s in ("seqvpp", "seqsmartvpp")},
    "seqpipe, level3": (4, {"pipeline": PIECES | {"scheduler": "seqpipe"}, **hsdp("level3")}),
}  # fmt: skip
"""Layouts whose backwards are not split: (ranks, settings)."""
SPLIT: dict[str, tuple[int, dict[str, Any]]] = {
    s: (2, {"pipeline": PIPE | {"scheduler": s}}) for s in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
}  # fmt: skip


def tied(parallel: dict[str, Any], precision: str = "fp64", p: float = 0.25) -> Job:
    model = {"_target_": "tests.parallel.recompute_nets.Tied", "p": p}
    data = {"name": "random_tokens", "vocab_size": 16, "seq_len": 8}
    train = {"steps": 1, "batch_size": 16, "precision": precision}
    return job(model=model, data=data, parallel=parallel, train=train, security={"allow": ["tests"]})


def seeded(world: World, cases: Mapping[Any, tuple[Job, Plan]]) -> dict[Any, tuple[float, list[Piece]]]:
    """Loss and gradients of each case, with the same random numbers."""
    out = {}
    for key, (j, plan) in cases.items():
        torch.manual_seed(3 + world.rank)
        loss, _, found = rank_step(world, j, plan)
        out[key] = loss, found
    return out


def both(ranks: int, plain: Job, ways: Mapping[str, Job], within: float = 0.0) -> None:
    """Assert that loss and gradients of ``ways`` equal those of ``plain``; gradients may differ by ``within``."""
    cases = {"": plain, **ways}
    for found in on_ranks(ranks, seeded, {k: (j, plan_job(j)) for k, j in cases.items()}):
        loss, pieces = found[""]
        assert pieces
        for way in ways:
            assert found[way][0] == loss
            for got, want in zip(found[way][1], pieces, strict=True):
                assert got.name == want.name
                assert error(got.value, want.value) <= within, f"{way}: {got.name}"


@pytest.mark.parametrize(("precision", "layout"), some(product(["fp64", "fp32"], WHOLE), one_in=9))
def test_gradients_with_dropout_are_bit_identical(precision, layout):
    ranks, parallel = WHOLE[layout]
    ways = {way: tied({**parallel, "recompute": asked}, precision) for way, asked in some_of(WAYS).items()}
    both(ranks, tied(parallel, precision), ways)


@pytest.mark.parametrize(("precision", "layout"), some(product(["fp64", "fp32"], SPLIT)))
def test_split_backwards_have_the_same_gradients_with_recomputation(precision, layout):
    ranks, parallel = SPLIT[layout]
    ways = {way: tied({**parallel, "recompute": asked}, precision) for way, asked in some_of(WAYS).items()}
    both(ranks, tied(parallel, precision), ways, ROUNDING[precision])


ROUNDING = {"fp64": 1e-12, "fp32": 1e-6}
"""Products deferred to the second half of a backward have other addresses, on which the order of sums may depend."""

LM = {"modules": "layers.*"}
SLICED: dict[str, tuple[int, dict[str, Any]]] = {
    "one stage": (2, {}),
    "1f1b": (4, {"pipeline": {"stages": 2}}),
    "level3": (4, {**hsdp("level3")}),
    "seqpipe": (4, {"pipeline": PIECES | {"scheduler": "seqpipe"}}),
}
TP_WAYS = {
    "full": LM,
    "selective": LM | {"policy": "selective", "keep": ["matmul"]},
    "full, what was sent kept": LM | {"comm": "keep"},
    "an operator": {"modules": ["layers.*.mlp.down", "layers.*.attn.q"]},
    "selective, what was sent kept": LM | {"policy": "selective", "comm": "keep"},
}


@pytest.mark.parametrize("layout", some(SLICED))
def test_operators_over_tp_have_the_same_gradients_with_recomputation(layout):
    ranks, parallel = SLICED[layout]
    parallel = {**parallel, "grid": {"tp": 2, **parallel.get("grid", {})}, "operators": MEGATRON}
    ways = {way: job(parallel={**parallel, "recompute": asked}) for way, asked in some_of(TP_WAYS).items()}
    both(ranks, job(parallel=parallel), ways)


@pytest.mark.parametrize(("stages", "level"), some(product([1, 2], ["none", "level2", "level3"])))
def test_data_dependent_models_have_the_same_gradients_with_recomputation(stages, level):
    parallel: dict[str, Any] = {"pipeline": {"stages": stages, "micro_batch_num": 2}}
    parallel |= {} if level == "none" else hsdp(level)
    ranks = stages * (1 if level == "none" else 2)

    def asked(recompute: Any) -> Job:
        net = {"_target_": "tests.parallel.recompute_nets.Experts"}
        return own("", [6], stages=stages, model=net, parallel={**parallel, "recompute": recompute})

    both(ranks, asked(None), {"full": asked(FULL), "selective": asked(SELECTIVE)})


@pytest.mark.parametrize("layout", ["1f1b", "seqpipe, level3"])
def test_gradients_with_recomputation_equal_one_process(layout):
    assert_parity(tied({**WHOLE[layout][1], "recompute": FULL}, p=0.0))


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "as told"])
@pytest.mark.parametrize("stages", [1, 2])
def test_running_statistics_move_once(stages, auto):
    """The buffers with the statistics are among the tensors that are compared."""

    def asked(recompute: Any) -> Job:
        net = {"_target_": "tests.parallel.recompute_nets.Normalized"}
        pipeline: dict[str, Any] = {"stages": stages, "micro_batch_num": 2}
        if stages == 2 and not auto:
            pipeline["stage_config"] = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "head": 1}
        parallel = {"pipeline": pipeline, "recompute": recompute}
        return own("", [6], stages=stages, model=net, parallel=parallel)

    both(stages, asked(None), {"full": asked(FULL), "selective": asked(SELECTIVE)})


HALVED = ("one stage, level2", "seqpipe", "1f1b, level3")


@pytest.mark.parametrize(("precision", "layout"), some(product(["fp16", "bf16"], HALVED), one_in=5))
def test_half_precision_has_the_same_gradients_with_recomputation(precision, layout):
    ranks, parallel = WHOLE[layout]
    ways = {way: tied({**parallel, "recompute": asked}, precision) for way, asked in some_of(WAYS).items()}
    both(ranks, tied(parallel, precision), ways)


COUNTED: dict[str, dict[str, Any]] = {
    "level1": {"pipeline": PIPE, **hsdp("level1")},
    "level3": {"pipeline": PIPE, **hsdp("level3")},
    "level3, one stage": hsdp("level3"),
    "level3, a weight a gather": {**hsdp("level3"), "comm_fusion": {"openstate": False}},
    "zero_bubble_h1": {"pipeline": PIPE | {"scheduler": "zero_bubble_h1"}},
    "seqpipe, level3": {"pipeline": PIECES | {"scheduler": "seqpipe"}, **hsdp("level3")},
}
"""Layouts without operators over tp, whose collectives are on their own lines of the plan."""


@pytest.mark.parametrize(
    ("way", "layout"), some(product(["full", "matmul and attention kept", "parts"], COUNTED), one_in=4)
)
def test_a_step_sends_what_is_planned(way, layout):
    assert_as_planned(tied({**COUNTED[layout], "recompute": WAYS[way]}))


@pytest.mark.parametrize("way", ["full", "parts"])
def test_gathers_of_single_weights_have_the_same_numbers(way):
    parallel = COUNTED["level3, a weight a gather"]
    assert_parity(tied({**parallel, "recompute": WAYS[way]}, p=0.0))


@pytest.mark.parametrize(("operators", "way"), some(product(["megatron", "sequence"], TP_WAYS)))
def test_collectives_that_operators_repeat_are_planned(operators, way):
    """Recomputation sends these besides the collectives of a plain step."""

    def asked(recompute: Any) -> Job:
        pipeline = {"micro_batch_num": 2}
        cut = {"megatron": MEGATRON, "sequence": SEQUENCE}[operators]
        parallel = {"grid": {"tp": 2}, "operators": cut, "pipeline": pipeline, "recompute": recompute}
        return job(parallel=parallel)

    plans = {k: plan_job(j) for k, j in ((None, asked(None)), (way, asked(TP_WAYS[way])))}
    plain, again = (on_ranks(2, rank_counts, asked(TP_WAYS.get(k)), plan) for k, plan in plans.items())
    want: Counter[tuple[str, str]] = Counter()
    for kind, nbytes in plans[way].estimate.rerun[0].sent:
        want[kind, "count"] += plans[way].sizes.micros
        want[kind, "bytes"] += plans[way].sizes.micros * nbytes
    for before, after in zip(plain, again, strict=True):
        more: Counter[tuple[str, str]] = Counter()
        for kind in after:
            there = before.get(kind, (0, 0))
            more[kind, "count"] += after[kind][0] - there[0]
            more[kind, "bytes"] += after[kind][1] - there[1]
        assert +more == +want


@pytest.mark.parametrize("layout", ["one stage, level3", "1f1b, level2"])
def test_auto_recomputation_has_the_same_gradients(layout):
    ranks, parallel = WHOLE[layout]
    plain = tied(parallel)
    free = max(m.total for m in plan_job(plain).estimate.memory)
    full = max(m.total for m in plan_job(tied({**parallel, "recompute": FULL})).estimate.memory)
    room = Cluster(memory_gb=(0.6 * full + 0.4 * free) / 2**30)
    auto = tied({**parallel, "recompute": "auto"}).model_copy(update={"cluster": room})
    assert len(plan_job(auto).recomputed) > 0
    both(ranks, plain, {"auto": auto})


@pytest.mark.parametrize("parallel", [{}, {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}])
def test_a_recomputed_module_shows_the_signature_of_its_forward(parallel):
    parallel = parallel | {"recompute": {"modules": ["a", "b"]}}
    assert_parity(own("recompute_nets.Signature", [6], stages=1, parallel=parallel, train__batch_size=8))


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no way with {tuple(x.shape)}")


def test_a_forward_that_raises_leaves_no_mode_behind_while_its_error_is_looked_at():
    model = nn.Sequential(Failing())
    install(model, [Recomputed("0", keep=("matmul",))], Axis(1))
    with pytest.raises(ValueError, match="no way with") as raised:
        model(torch.ones(2, requires_grad=True))
    assert raised.tb is not None  # including the frames of torch's checkpoint
    assert torch._C._len_torch_dispatch_stack() == 0
