"""Measured times are shown beside the predictions before and after, and written as a cluster that can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.extras.calibration.refit import changed, number
from launcher.extras.layout_search.evaluate import Finalist
from launcher.extras.layout_search.measure import (
    MeasuredCluster,
    MeasuredLayout,
    cluster_file,
    measured_cluster,
    note,
    refitted,
    table,
)
from launcher.extras.layout_search.search import search
from launcher.extras.layout_search.show import Ranking, took
from launcher.job.compose import compose
from launcher.plan.time.speeds import speeds_of
from tests.plan.time.two_cores import TWO_CORES

ASKED = (
    "recipe=lm_single", "launch.nproc=2", "train.batch_size=16", "steps=[train]", "data=random_tokens",
    "data.vocab_size=256", "data.seq_len=64", "model.dim=64", "model.layers=4", "search.measure=3",
    "parallel.pipeline.stages=[1,2]", "parallel.pipeline.micro_batch_num=[2,4]",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> tuple[list[Finalist], Ranking]:
    return search(compose([*ASKED, *TWO_CORES]).job)


def told(found: tuple[list[Finalist], Ranking], **failed: str) -> MeasuredCluster:
    """Return the result if products run at half of their predicted speed; the slowest layout may have ``failed``."""
    finalists, ranking = found
    slow = speeds_of(changed(ranking.question.job.cluster, {"efficiency": 0.48}), "fp32", 2)
    assert slow is not None
    ran = [MeasuredLayout(one, one.predicted.on(slow)) for one in finalists]
    if failed:
        ran[-1] = replace(ran[-1], seconds=None, **failed)
    return measured_cluster(ranking, ran)


def test_a_table_has_what_was_measured_beside_what_is_predicted_before_and_after(
    found: tuple[list[Finalist], Ranking],
) -> None:
    at = told(found, why="rank 1: MemoryError: no room")
    first, second, third = (took(seconds) for seconds in at.after)
    assert [*table(at)] == [
        "       time  predicted  refitted  layout",
        f"   42.82 ms   34.30 ms  {first}  2 x 4, 2 copies",
        f"   53.16 ms   40.69 ms  {second}  2 stages 1f1b, 2 x 8",
        f"did not run   43.76 ms  {third}  4 x 2, 2 copies (rank 1: MemoryError: no room)",
    ]


def test_a_note_says_the_same_in_words(found: tuple[list[Finalist], Ranking]) -> None:
    at = told(found)
    first, second, third = (took(seconds) for seconds in at.after)
    moved = (f"{key} {number(old)} -> {number(new)}" for key, (old, new) in at.refit.fitted.items())
    before, after = at.errors
    assert [*note(at)] == [
        f"42.82 ms, 34.30 ms predicted, {first} refitted: 2 x 4, 2 copies",
        f"53.16 ms, 40.69 ms predicted, {second} refitted: 2 stages 1f1b, 2 x 8",
        f"52.31 ms, 43.76 ms predicted, {third} refitted: 4 x 2, 2 copies",
        ", ".join(moved),
        f"predictions of 3 measured layouts were off by {before:.1%} on average, with these constants by {after:.1%}",
    ]
    assert at.refit.fitted["efficiency"][0] == 0.96


def test_constants_come_nearer_to_what_they_are(found: tuple[list[Finalist], Ranking]) -> None:
    at = told(found)
    before, after = at.errors
    assert before > 0.19
    assert after < 0.02
    assert at.faster is None
    assert at == told(found)


def test_a_layout_that_would_be_faster_and_was_not_measured_is_named(found: tuple[list[Finalist], Ranking]) -> None:
    """Only the slowest layout was measured, and it took the predicted time."""
    finalists, ranking = found
    one = finalists[-1]
    at = measured_cluster(ranking, [MeasuredLayout(one, one.predicted.seconds)])
    assert [*refitted(at)] == [
        "no constant is changed",
        "predictions of 1 measured layout were off by 0.0% on average, with these constants by 0.0%",
        "2 x 4, 2 copies was not measured, and is predicted to take 34.30 ms with these constants, less than the best "
        "measured one",
    ]


def test_the_file_predicts_what_the_table_says(tmp_path: Path, found: tuple[list[Finalist], Ranking]) -> None:
    at = told(found)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(cluster_file(at))
    before, after = at.errors
    assert cluster_file(at).startswith(
        f"# Written by a search for {at.ran[0].finalist.job.name}.\n"
        "# The constants of here, some of them refitted: predictions of 3 measured layouts were off by "
        f"{before:.1%} on average, with these constants by {after:.1%}.\n"
        "# Copy it to DIR/cluster/NAME.yaml, then --config-dir DIR cluster=NAME.\n"
        'defaults:\n  - unknown\n  - _self_\nname: "here (refitted)"\n'
    )
    assert f"\nefficiency: {number(at.refit.fitted['efficiency'][1])}  # refitted, was 0.96\n" in cluster_file(at)
    latency = number(at.refit.fitted["links.inside.latency_us"][1])
    assert (
        f"\n  inside: {{latency_us: {latency}, gb_per_s: 1.11, message_gb_per_s: 3.92}}  # latency_us "
        in cluster_file(at)
    )
    read = compose([*ASKED, "cluster=mine"], config_dir=tmp_path).job
    assert read.cluster == at.refit.cluster.model_copy(update={"name": "here (refitted)"})
    again, ranking = search(read)
    by_layout = {one.predicted.layout: one.predicted.seconds for one in again}
    assert [by_layout[one.finalist.predicted.layout] for one in at.ran] == list(at.after)

    # after another fit it still has the same name
    ran = [MeasuredLayout(one, one.predicted.seconds) for one in again]
    assert '\nname: "here (refitted)"\n' in cluster_file(measured_cluster(ranking, ran))


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (
            "plan/cluster.yaml",
            "search.best = plan/cluster.yaml: the refitted cluster is written to this file; give the recipe another "
            "name\n    set by: search.best=plan/cluster.yaml (command line)\n",
        ),
        ("own/best.yaml", "search.best: own/cluster.yaml: exists, and was not written by a search\n"),
    ],
)
def test_where_the_cluster_cannot_be_written_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], best: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/cluster.yaml").write_text("mine: true\n")
    assert main([*ASKED, *TWO_CORES, "show=search", f"search.best={best}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: 1 problem in this request; nothing was started\n\n  {said}")
    assert shown.out == ""
