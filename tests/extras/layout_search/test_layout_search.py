"""Settings left open: the layout that is found runs, trains as one process does, and is a recipe by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.extras.layout_search import choose
from launcher.job.compose import compose
from launcher.job.schema.search import Search
from launcher.run.frozen_request import recipe_text
from tests.run.launching import TINY, losses, run, shape, steps

OPEN = ("parallel=auto", "parallel.hsdp=[null,{shard_size: 2}]", "cluster=here", "launch.nproc=2")


def test_a_layout_that_was_found_trains_the_losses_of_one_process(tmp_path: Path) -> None:
    one = run(tmp_path / "one", *shape(), steps=3)
    found = run(tmp_path / "found", *OPEN, steps=3)
    assert losses(found) == pytest.approx(losses(one), rel=1e-5)
    assert steps(found) == [1, 2, 3]
    settled = yaml.safe_load((found / "config.yaml").read_text())
    assert settled["search"]["over"] == {}


def test_show_search_writes_a_recipe_that_runs_and_is_certified(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*TINY, *OPEN, "train.steps=2", "steps=[train,certify]")
    assert main([*asked, "show=search", "run_dir=asked"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("search over ")
    assert "recipe     plan/best.yaml: python -m launcher recipe=plan/best.yaml" in shown
    assert not Path("asked").exists()

    written = Path("plan/best.yaml").read_text()
    job = compose(["recipe=plan/best.yaml"]).job
    assert recipe_text(job, ()) == written[written.index("defaults:") :]
    assert job.search == Search()
    assert main(["recipe=plan/best.yaml", "run_dir=best", "logger=plain"]) == 0
    assert "certify: holds: " in capsys.readouterr().out

    # a search overwrites only what a search has written
    assert main([*asked, "show=search"]) == 0
    Path("plan/best.yaml").write_text("mine: true\n")
    assert main([*asked, "show=search"]) == 2
    assert "  search.best = plan/best.yaml: exists, and was not written by a search\n" in capsys.readouterr().err


SOME = ("recipe=lm_single", "cluster=h100_sxm", "launch.nproc=2")


def test_a_search_with_nothing_left_open_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*SOME, "show=search", "search.best=null")
    assert main(asked) == 2
    assert (
        "  show = search: nothing is set to auto: set keys below parallel to auto or to lists; parallel=auto "
        "opens all of them\n    set by: show=search (command line)\n    try:    show=search parallel=auto\n"
    ) in capsys.readouterr().err
    choose.check(compose([*asked, "parallel=auto"]).job)


def test_a_search_replaces_no_file_of_another_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*SOME, "show=search", "parallel.pipeline.stages=[1,2]")
    assert main(asked) == 0
    first = Path("plan/best.yaml").read_text()
    assert first.startswith("# Written by a search for lm_single.\n")
    capsys.readouterr()

    other = (*asked, "name=other")
    assert main(other) == 2
    text = "plan/best.yaml: a search for lm_single wrote it; this one is for other"
    refused = capsys.readouterr().err
    assert f"  search.best = {text}\n" in refused
    assert "    try:    search.best=plan/other/best.yaml\n" in refused
    assert main([*other, "search.best=plan/other/best.yaml"]) == 0
    assert Path("plan/other/best.yaml").read_text().startswith("# Written by a search for other.\n")
    assert Path("plan/best.yaml").read_text() == first


def test_a_search_replaces_no_cluster_of_another_recipe(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("# Written by a search for another.\n")
    best = f"search.best={tmp_path}/best.yaml"
    job = compose([*SOME, "show=search", "parallel.pipeline.stages=[1,2]", best, "search.measure=2"]).job
    with pytest.raises(RequestError) as caught:
        choose.check(job)
    assert [str(p) for p in caught.value.problems] == [
        f"search.best: {tmp_path}/cluster.yaml: a search for another wrote it; this one is for lm_single "
        f"(try: search.best={tmp_path}/lm_single/best.yaml)"
    ]


def test_the_recipe_of_a_search_over_epochs_states_the_epochs_and_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("data=random_tokens", "data.vocab_size=256", "data.seq_len=8", "data.samples=64", "train.batch_size=16")
    length = ("train.steps=null", "train.epochs=2", "steps=[train]")
    best = tmp_path / "best.yaml"
    words = ("parallel.pipeline.stages=[1,2]", "show=search", f"search.best={best}")
    assert main(["model=lm_tiny", "cluster=h100_sxm", "launch.nproc=2", *data, *length, *words]) == 0
    capsys.readouterr()
    assert main([f"recipe={best}", "show=plan"]) == 0
    assert "train.steps null -> 8: 2 epochs of 64 samples" in capsys.readouterr().out
