"""A plan does its work once for all equal parts. The work is counted, because seconds differ by machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.models.language_model import Block
from launcher.parallel.deferred_init import constructor
from launcher.parallel.tensor_parallel import propagate
from launcher.parallel.trace import build_graph, code_between_modules
from launcher.plan.cut import stages
from launcher.plan.values import module_names
from launcher.plan.values.layout import Layout
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.tiers import some

TWO = {"stages": 2, "micro_batch_num": 2}
MEGATRON = {
    "layers.*.attn.[qkv]": {"weight": ["tp", None]}, "layers.*.attn.o": {"weight": [None, "tp"]},
    "layers.*.mlp.gate": {"weight": ["tp", None]}, "layers.*.mlp.up": {"weight": ["tp", None]},
    "layers.*.mlp.down": {"weight": [None, "tp"]},
}  # fmt: skip
TP = {"grid": {"tp": 2}, "operators": MEGATRON}
OURS = {
    "lm": ["recipe=lm_pp4_interleaved"],
    "lm, cut over tp, run again": [
        "recipe=lm_tp2",
        "launch.nproc=8",
        "parallel.pipeline.stages=2",
        "parallel.recompute.modules=layers.*",
    ],
    "mlp": ["recipe=mlp_autoparallel"],
    "tied_pair": ["recipe=tied_pp2_to_single"],
    "resnet": ["recipe=resnet50_cifar_pp2", "model.depth=18"],
}


@contextmanager
def counting(owner: Any, name: str) -> Iterator[Counter[str]]:
    """Count the calls of ``owner.name`` inside the block."""
    calls: Counter[str] = Counter()
    plain: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return plain(*args, **kwargs)

    with patch.object(owner, name, counted):
        yield calls


def deep(layers: int, nproc: int = 2, **parallel: Any) -> Job:
    return job(
        model__layers=layers, launch__nproc=nproc, train__batch_size=32,
        parallel={"pipeline": TWO, "hsdp": {"shard_size": 1}, **parallel},
    )  # fmt: skip


def forwards(j: Job) -> int:
    with counting(Block, "forward") as calls:
        plan_job(j)
    return calls["forward"]


@pytest.mark.parametrize(("parallel", "times"), [({}, 1), (TP, 3)], ids=["pp", "pp x tp"])
def test_a_layer_is_followed_once_and_once_more_whole_and_cut_over_tp(parallel, times):
    nproc = 4 if parallel else 2
    assert forwards(deep(12, nproc, **parallel)) - forwards(deep(6, nproc, **parallel)) == 6 * times


def boxes(nproc: int) -> int:
    with counting(Layout, "box") as calls:
        plan_job(deep(2, nproc, hsdp={"shard_size": 2, "threshold": 0}))
    return calls["box"]


def test_bytes_of_ranks_that_hold_the_same_are_added_up_once():
    assert boxes(32) == boxes(4)


def test_the_bytes_of_equal_layers_are_added_up_once():
    with counting(Layout, "box") as few, counting(module_names, "nearest") as guesses:
        plan_job(deep(4))
    with counting(Layout, "box") as many:
        plan_job(deep(16))
    assert many["box"] == few["box"]
    assert not guesses


def test_auto_reads_a_model_and_its_operators_once():
    plain = plan_job(deep(4, 4, **TP))
    full = plan_job(deep(4, 4, recompute={"modules": "layers.*"}, **TP))

    # room for some of the layers
    room = sum(max(m.total for m in plan.estimate.memory) for plan in (plain, full)) / 2
    j = deep(4, 4, recompute={"modules": "auto"}, **TP)
    j = j.model_copy(update={"cluster": j.cluster.model_copy(update={"memory_gb": room / GB})})
    with (
        counting(constructor, "record") as read_once,
        counting(propagate, "follow") as followed,
        counting(build_graph, "graph") as traced,
    ):
        made = plan_job(j)
    assert made.recomputed
    assert (read_once["record"], followed["follow"]) == (1, 1)
    assert traced["graph"] >= 4


def test_a_name_that_is_there_is_compared_with_no_other():
    j = deep(4, recompute={"modules": [f"layers.{n}" for n in range(4)]})
    with counting(module_names, "nearest") as guesses, counting(module_names, "fnmatchcase") as matched:
        assert len(plan_job(j).recomputed) == 4
    assert not guesses
    assert not matched


@pytest.mark.parametrize("name", some(OURS))
def test_a_model_of_this_package_does_the_same_each_time(name):
    j = compose(OURS[name]).job
    once = plan_job(j)
    assert len(once.stages) > 1

    # as a user's own class it is traced once more, in evaluation mode
    with patch.object(build_graph, "trace_ours", code_between_modules.trace):
        assert plan_job(j) == once


def test_around_is_all_that_covers_a_name():
    names = ["", "a", "a.b", "a.b.c", "ab", "a.bc"]
    for name in names:
        assert {m for m in names if stages.covers(m, name)} == {m for m in names if m in stages.around(name)}
