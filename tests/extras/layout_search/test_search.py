"""The layout that is found is the best of all layouts, by plans that share no code with the search."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.extras.layout_search.candidates import LayoutCandidate, space
from launcher.extras.layout_search.if_none_fits import RequestChange
from launcher.extras.layout_search.search import search
from launcher.extras.layout_search.show import Ranking, notes, nothing, text
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Parallel
from launcher.plan.memory.fits_cluster import tightest
from launcher.planner.plan_job import plan_job
from launcher.planner.trace_model import Traces

HERE = ("recipe=lm_single", "cluster=h100_sxm", "launch.nproc=4", "train.batch_size=16")
GB = 1 << 30


def job(*overrides: str) -> Job:
    return compose([*HERE, *overrides]).job


def by_hand(asked: Job, layout: LayoutCandidate) -> Job:
    """Return the request of one layout, as a person would write it."""
    pipeline: dict[str, Any] = {
        "stages": layout.stages,
        "scheduler": layout.scheduler,
        "micro_batch_num": layout.micros,
    }
    if layout.chunks > 1:
        pipeline |= {"interleave": True, "chunks": layout.chunks}
    parallel = {
        "pipeline": pipeline,
        "grid": {"tp": layout.tp},
        "operators": asked.search.over["parallel.operators"][layout.operators] if layout.tp > 1 else {},
        "hsdp": None if layout.hsdp is None else layout.hsdp.model_dump(),
        "recompute": asked.search.over.get("parallel.recompute"),
    }
    search = type(asked.search)()
    return asked.model_copy(update={"parallel": Parallel.model_validate(parallel), "search": search})


def brute(asked: Job, traces: Traces) -> list[tuple[float, int, LayoutCandidate]]:
    """Return the seconds and bytes of every layout that can be planned."""
    out = []
    for layout in space(asked).layouts:
        try:
            plan = plan_job(by_hand(asked, layout), traces)
        except RequestError:
            continue
        assert plan.estimate.step is not None
        out.append((plan.estimate.step.seconds, tightest(plan.estimate.memory, 0).needed, layout))
    return out


OPEN = (
    "parallel=auto", "parallel.recompute=null", "parallel.comm_fusion={}",
    "parallel.pipeline.scheduler=[1f1b,zero_bubble_h1]", "parallel.pipeline.chunks=[2]",
)  # fmt: skip


@pytest.mark.parametrize(
    "batch", [(), ("train.batch_size=64", "model.dim=512", "model.heads=8"), ("data.seq_len=512",)]
)
def test_nothing_is_faster_of_all_that_fit(batch: tuple[str, ...]) -> None:
    traces = Traces()
    asked = job(*OPEN, *batch)
    every = brute(asked, traces)
    sizes = sorted(nbytes for _, nbytes, _ in every)
    for room in (sizes[-1], sizes[len(sizes) // 2], sizes[len(sizes) // 8]):
        cluster = asked.cluster.model_copy(update={"memory_gb": (room + 1) / GB})
        _, ranking = search(asked.model_copy(update={"cluster": cluster}), traces=traces)
        best = min(seconds for seconds, nbytes, _ in every if nbytes <= room)
        assert ranking.best[0].seconds <= 1.01 * best
        assert len(ranking.predictions) < len(every)


@pytest.mark.parametrize("room", [0.012, 0.018])
def test_nothing_is_faster_of_all_that_fit_once_blocks_run_again(room: float) -> None:
    """Here the plan of each layout chooses its own blocks; the search mixes plans with none and with all recomputed."""
    traces = Traces()
    asked = job(
        "parallel=auto", "parallel.comm_fusion={}", "parallel.pipeline.scheduler=[1f1b,zero_bubble_h1]",
        "parallel.pipeline.chunks=[2]", "parallel.hsdp.optimizer_level=[level1]", f"cluster.memory_gb={room}",
        "parallel.pipeline.micro_batch_num=[4,8]", "model.layers=8", "data.seq_len=256",
    )  # fmt: skip
    settled, ranking = search(asked, traces=traces)
    every = [seconds for seconds, nbytes, _ in brute(asked, traces) if nbytes <= room * GB]
    assert settled[0].predicted.nbytes <= room * GB
    assert settled[0].predicted.seconds <= 1.01 * min(every)
    assert len(ranking.predictions) < ranking.layouts


def searched(*overrides: str) -> tuple[Job, Ranking]:
    first, ranking = search(job(*overrides))
    return first[0].job, ranking


def test_the_chosen_layout_has_the_time_and_memory_that_were_predicted() -> None:
    settled, ranking = searched("parallel=auto", "cluster.memory_gb=0.02")
    first = ranking.best[0]
    plan = plan_job(settled)
    assert not settled.search.over
    assert plan.estimate.step is not None
    assert plan.estimate.step.seconds == pytest.approx(first.seconds)
    assert tightest(plan.estimate.memory, 0).needed == first.nbytes <= 0.02 * GB


def test_as_many_are_found_as_are_to_be_measured_and_they_are_the_best() -> None:
    traces = Traces()
    asked = job(*OPEN, "search.measure=4")
    found, _ = search(asked, traces=traces)
    every = sorted(seconds for seconds, _, _ in brute(asked, traces))
    assert len(found) == 4
    for one, best in zip(found, every, strict=False):
        assert one.predicted.seconds <= 1.01 * best


def test_layouts_that_are_to_be_measured_can_be_predicted_on_other_devices() -> None:
    """On the same devices the prediction is unchanged, also between two plans."""
    _, ranking = search(job("parallel=auto", "cluster.memory_gb=0.02", "search.measure=2"))
    assert {len(one.works) for one in ranking.predictions} == {1, 2}
    for one in ranking.predictions:
        assert one.on(ranking.question.speeds) == pytest.approx(one.seconds, rel=1e-12)


def test_two_processes_find_the_same_layouts_as_one() -> None:
    asked = job("parallel=auto", "cluster.memory_gb=0.02")
    one, other = search(asked, 1), search(asked, 2)
    assert one[0] == other[0]
    assert list(text(one[1])) == list(text(other[1]))


def test_every_setting_that_was_open_has_a_note() -> None:
    _, ranking = searched("parallel.pipeline.stages=[1,2]", "parallel.hsdp.optimizer_level=auto")
    stages, hsdp = notes(ranking)
    first, *others = ranking.best
    level = first.layout.shown()["hsdp"]
    next_level = next(x for x in others if x.layout.shown()["hsdp"] != level)
    assert str(stages) == (
        f"parallel.pipeline.stages auto -> 1: {first.seconds * 1e3:.2f} ms a step; layouts "
        "with other values do not fit, or cannot be faster"
    )
    assert str(hsdp).startswith(
        f"parallel.hsdp auto -> {level}: {first.seconds * 1e3:.2f} ms a step, "
        f"{next_level.seconds * 1e3:.2f} ms with {next_level.layout.shown()['hsdp']}"
    )


def test_micro_batches_that_mean_something_are_no_matter_of_speed() -> None:
    asked = ("recipe=resnet50_cifar_pp2", "parallel.pipeline.micro_batch_num=auto", "cluster=h100_sxm")
    with pytest.raises(RequestError) as caught:
        search(compose(asked).job)
    assert str(caught.value) == (
        "parallel.pipeline.micro_batch_num: auto: what this model computes depends "
        "on the number of samples in a micro batch, and the micro batches of these layouts "
        "have 1, 2, 4, 8, 16"
    )


def test_where_nothing_fits_the_change_that_helps_most_is_named_and_holds() -> None:
    asked = job("parallel.pipeline.stages=[1,2,4]", "cluster.memory_gb=0.02")
    with pytest.raises(RequestError) as caught:
        search(asked)
    (problem,) = caught.value.problems
    assert problem.key == "parallel.pipeline.stages"
    assert problem.text.startswith("auto: none of 3 layouts fits; the smallest planned one needs ")
    assert "; the single change " in problem.text
    assert problem.cure
    search(job("parallel.pipeline.stages=[1,2,4]", "cluster.memory_gb=0.02", *problem.cure.split()))


def test_a_change_that_saves_nothing_is_not_named() -> None:
    _, ranking = search(job("parallel.pipeline.stages=[1,2]"))
    least = min(one.nbytes for one in ranking.predictions)
    asked = ranking.question.job
    without = nothing(ranking)
    assert nothing(ranking, (RequestChange("launch.nnodes=2", asked), least)) == without
    saves = nothing(ranking, (RequestChange("launch.nnodes=2", asked), least - 1))
    assert saves.text.startswith(f"{without.text}; the single change launch.nnodes=2 helps most: ")


def test_if_no_layout_can_be_planned_each_reason_is_counted() -> None:
    with pytest.raises(RequestError) as caught:
        searched("parallel.pipeline.stages=[3,5]")
    assert str(caught.value) == (
        "parallel.pipeline.stages: auto: none of 2 layouts can be planned: "
        "1 x 4 ranks cannot be divided evenly into 3 x 1; 1 x 4 ranks cannot be divided evenly into 5 x 1"
    )


def test_auto_recomputation_is_chosen_only_if_memory_requires_it() -> None:
    """The candidate ``null`` is chosen if memory is ample, or if its size is not known."""
    words = ("recipe=lm_tied_pp2_hsdp2", "cluster=h100_sxm", "parallel.recompute=[null,auto]")
    for room, fits in (("0.03", True), ("80", False), ("null", False)):
        first, ranking = search(compose([*words, f"cluster.memory_gb={room}"]).job)
        chosen = first[0].job.parallel.recompute
        assert (chosen is not None) == fits
        assert ranking.layouts == 2
