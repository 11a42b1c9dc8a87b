"""A rank that runs out of memory reports in one message its memory, the plan, and the setting that needs less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job
from tests.run.launching import TINY, shape

SIZE = r"[0-9.]+ [KMG]?B"


def words(of: str, *more: str) -> list[str]:
    model = f"model={{_target_: tests.run.own.Feeding, vocab: 64, dim: 256, rank: 1, of: {of}}}"
    return [*TINY[2:], model, "security.allow=[tests]", "train.steps=1", *shape(pp=2), *more]


def test_on_a_device_the_cure_passes_when_pasted_and_plans_for_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = words("a device", "parallel.pipeline.stage_config={embed: 0, blocks: 0, hungry: 1, head: 1}")
    assert main([*typed, f"run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"error: rank 1: out of memory on cpu, an allocation of 2\.0 MB failed: "
        rf"its process used {SIZE}; {SIZE} was free",
        said[0],
    )
    assert re.fullmatch(rf"  planned: {SIZE} \(.*params {SIZE}.*\)", said[1])
    cure = re.fullmatch(rf"  try: (.*) \(planned: {SIZE}\)", said[2])
    assert cure is not None
    assert said[3:] == ["also ended: rank 0 (lost its peer)", f"log: {tmp_path}/run/logs/rank1.log"]

    # the same request with the cure pasted
    planned, lighter = (plan_job(compose(each).job) for each in (typed, [*typed, *cure[1].split(" ")]))
    assert lighter.estimate.memory[1].total < planned.estimate.memory[1].total
    assert "Tried to allocate" in (tmp_path / "run" / "logs" / "rank1.log").read_text()


def test_an_allocation_that_no_layout_can_fit_is_said_to_be_unplanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words("cpu"), f"run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err.splitlines()
    start = "error: rank 1: out of memory on cpu, an allocation of 1048576.0 TB failed: its process used"
    assert said[0].startswith(start)
    assert said[2] == "  most of this memory is not in the plan: your own code uses it, or the process itself"
    assert "Traceback" not in "\n".join(said)


def test_code_of_the_user_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hungry = "callbacks=[{_target_: tests.run.callbacks.Hungry}]"
    typed = [*TINY, *shape(), hungry, "security.allow=[tests]", "train.steps=1"]
    assert main([*typed, f"run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: rank 0: out of memory on cpu, an allocation of 20.0 GB failed: ")
    assert said[-2].startswith(
        "  callbacks.0 tests.run.callbacks.Hungry.on_step failed after step 1: OutOfMemoryError: "
    )


def test_of_another_training_there_is_no_plan_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words("a device", "steps=[certify]"), f"run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: rank 1: out of memory on cpu, an allocation of 2.0 MB failed: ")
    assert not any("planned" in line for line in said)
