"""``calibrate`` on real ranks: it writes a cluster to plan with, and writes nothing on a noisy machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job
from tests.run.launching import TINY

SHORT = ("steps=[calibrate]", "steps.calibrate.seconds=0.1", "parallel.hsdp=null", "train.steps=1", "launch.nproc=2")


def test_a_calibrated_cluster_can_be_used_by_a_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "mine/cluster/bench.yaml"
    words = [*TINY, *SHORT, f"run_dir={tmp_path}/run", f"steps.calibrate.to={to}", "steps.calibrate.spread=1e9"]
    assert main(words) == 0
    out = capfd.readouterr().out
    use = f"--config-dir {tmp_path}/mine cluster=bench"
    assert re.search(rf"calibrate: {to}: 5 rounds, median spread \d+%, .* to use it: {use}\n", out)

    # every number has a comment on its origin
    lines = [line for line in to.read_text().splitlines() if re.match(r" *[a-z_0-9]+: [0-9]", line)]
    assert [line for line in lines if "  # " not in line] == []
    assert sum("; spread" in line for line in lines) == 10

    # a plan uses it
    job = compose([*TINY, "train.steps=1", "cluster=bench"], config_dir=tmp_path / "mine").job
    assert job.cluster.name == "bench"
    step = plan_job(job).estimate.step
    assert step is not None
    assert 0 < step.seconds < 60


def test_by_default_calibrate_writes_to_the_run_folder(tmp_path: Path) -> None:
    assert main([*TINY, *SHORT, f"run_dir={tmp_path}/run", "steps.calibrate.spread=1e9"]) == 0
    assert (tmp_path / "run/here.yaml").read_text().startswith("# Measured by steps=[calibrate] on 20")


def test_a_noisy_machine_is_reported_and_nothing_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "bench.yaml"
    words = [*TINY, *SHORT, f"run_dir={tmp_path}/run", f"steps.calibrate.to={to}", "steps.calibrate.spread=1e-9"]
    assert main(words) == 1
    err = capfd.readouterr().err
    assert re.search(
        r"calibrate: nothing is written, because the machine is too busy: .*tflops\.fp32 [0-9.]+ \(spread \d+%\), .*"
        r"; at most 0%\. Run it again while the machine is idle",
        err,
    )
    assert not to.exists()


REFUSED = {
    "a folder that cannot be made": (
        "steps.calibrate.to=file/bench.yaml",
        "  steps.calibrate.to: the folder of this output cannot be made at file: file is not a folder\n"
        "    set by: steps.calibrate.to=file/bench.yaml (command line)\n",
    ),
    "a name that is no cluster's": (
        "steps.calibrate.to=bench.json",
        "  steps.calibrate.to = bench.json: should be a file NAME.yaml, or run:NAME.yaml in the run folder\n"
        "    set by: steps.calibrate.to=bench.json (command line)\n"
        "    try:    steps.calibrate.to=bench.yaml\n",
    ),
    "a folder": (
        "steps.calibrate.to=there.yaml",
        "  steps.calibrate.to = there.yaml: is a folder, not a file\n"
        "    set by: steps.calibrate.to=there.yaml (command line)\n",
    ),
    "one rank": (
        "launch.nproc=1",
        "  steps.calibrate: links between ranks cannot be measured on 1 rank\n"
        "    set in: conf/steps/calibrate.yaml:2:1\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_calibration_that_cannot_be_written_or_measured_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "there.yaml").mkdir()
    word, said = REFUSED[name]
    one = ["parallel.pipeline.stages=1"] if name == "one rank" else []
    assert main([*TINY, *SHORT, "run_dir=run", word, *one]) == 2
    assert f"error: 1 problem in this request; nothing was started\n\n{said}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
