"""The layouts that a request leaves open, and why others are impossible."""

from __future__ import annotations

import pytest

from launcher.extras.layout_search.candidates import impossible, space
from launcher.job.compose import compose
from launcher.job.schema.job import Job

HERE = ("recipe=lm_single", "cluster=h100_sxm", "launch.nproc=4", "train.batch_size=16")


def job(*overrides: str) -> Job:
    return compose([*HERE, *overrides]).job


def test_settings_that_are_not_open_keep_their_values() -> None:
    (layout,) = space(job()).layouts
    assert layout.shown() == {
        "tp": "1", "operators": "as requested", "stages": "1", "scheduler": "1f1b", "chunks": "1", "micros": "1",
        "hsdp": "none", "recompute": "as requested",
    }  # fmt: skip
    assert (layout.replicas, layout.micro) == (4, 4)


def test_micro_batches_cut_a_ranks_samples_and_fill_the_stages() -> None:
    found = space(job("parallel.pipeline.stages=auto", "parallel.pipeline.micro_batch_num=auto"))
    assert [(x.stages, x.micros, x.micro) for x in found.layouts] == [
        (1, 1, 4), (1, 2, 2), (1, 4, 1),
        (2, 2, 4), (2, 4, 2), (2, 8, 1),
        (4, 4, 4), (4, 8, 2), (4, 16, 1),
    ]  # fmt: skip
    assert found.out == {"fewer micro batches than stages": 3}


def test_layouts_that_do_not_divide_are_counted_by_reason() -> None:
    found = space(job("parallel.pipeline.stages=[2,3]", "parallel.pipeline.micro_batch_num=[2,3]"))
    assert [(x.stages, x.micros) for x in found.layouts] == [(2, 2)]
    assert found.out == {
        "8 samples of a rank cannot be divided evenly into 3 micro batches": 1,
        "4 ranks cannot be divided evenly into 3 x 1": 1,
    }


def test_sharing_has_every_size_and_level() -> None:
    found = [x.shown()["hsdp"] for x in space(job("parallel.hsdp=auto")).layouts]
    assert found == ["none", *(f"level{level}/{shard}" for shard in (2, 4) for level in (1, 2, 3))]
    fixed = space(job("parallel.hsdp.optimizer_level=[level1,level3]", "parallel.hsdp.shard_size=2")).layouts
    assert [x.shown()["hsdp"] for x in fixed] == ["level1/2", "level3/2"]


@pytest.mark.parametrize(("asked", "shown"), [("{}", ["level1/2", "level1/1"]), ("{shard_size: 2}", ["level1/2"] * 2)])
def test_sharing_that_is_asked_for_stays_whatever_the_stages(asked: str, shown: list[str]) -> None:
    """The plan refuses impossible ones: the search leaves out nothing that the request fixes."""
    found = space(job("parallel.pipeline.stages=[2,4]", f"+parallel.hsdp={asked}")).layouts
    assert [x.shown()["hsdp"] for x in found] == shown


def test_operators_are_cut_where_there_is_something_to_cut_over() -> None:
    found = space(job("parallel.operators=auto", "parallel.grid.tp=auto"))
    assert [(x.tp, x.operators) for x in found.layouts] == [
        (1, "none"), (2, "megatron"), (2, "sequence"), (4, "megatron"), (4, "sequence"),
    ]  # fmt: skip


def test_schedules_have_their_chunks() -> None:
    asked = ("parallel.pipeline.stages=2", "parallel.pipeline.scheduler=auto",
             "parallel.pipeline.interleave=auto", "parallel.pipeline.chunks=[2,4]")  # fmt: skip
    found = space(job(*asked, "parallel.pipeline.micro_batch_num=[2,4]"))
    every = [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zero_bubble_h1", 1), ("zero_bubble_v", 1)]
    assert [(x.micros, x.scheduler, x.chunks) for x in found.layouts] == [
        *((2, *one) for one in every), *((4, *one) for one in every), (4, "dualpipe_v", 1),
    ]  # fmt: skip
    assert found.out == {"fewer micro batches than virtual stages, which dualpipe_v needs": 1}


def test_a_level_that_drops_weights_is_not_for_backwards_that_are_split() -> None:
    """With one shard the weights are not sharded, so the level is allowed."""
    asked = ("parallel.pipeline.stages=2", "parallel.pipeline.scheduler=[1f1b,zero_bubble_h1]",
             "+parallel.hsdp={optimizer_level: level3}", "parallel.hsdp.shard_size=[1,2]")  # fmt: skip
    found = space(job(*asked))
    assert [(x.scheduler, x.shown()["hsdp"]) for x in found.layouts] == [
        ("1f1b", "level3/1"), ("1f1b", "level3/2"), ("zero_bubble_h1", "level3/1"),
    ]  # fmt: skip
    assert found.out == {"level3 drops weights before zero_bubble_h1 computes their gradients": 1}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["cluster=unknown"],
            "cluster: layouts are compared by the speed of the devices, which is unknown (try: cluster=h100_sxm)",
        ),
        (
            ["launch.nproc=null"],
            "launch.nproc: null: a search needs the number of ranks (try: launch.nproc=8)",
        ),
        (
            ["parallel.gradients_mean=false"],
            "parallel.gradients_mean: false: the size of a step would depend on the layout that is chosen "
            "(try: parallel.gradients_mean=true)",
        ),
        (
            ["parallel.pipeline.loss_reduction=sum"],
            "parallel.pipeline.loss_reduction: sum: the size of a step would depend on the layout that is chosen "
            "(try: parallel.pipeline.loss_reduction=mean)",
        ),
    ],
)
def test_requests_that_a_search_cannot_plan_are_refused(overrides: list[str], told: str) -> None:
    (problem,) = impossible(job("parallel.pipeline.stages=auto", *overrides))
    assert f"{problem.key}: {problem.text} (try: {problem.cure})" == told
