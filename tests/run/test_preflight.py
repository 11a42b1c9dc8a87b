"""The checks before a run read each thing only once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.planner import plan_job
from launcher.planner.plan_job import check_without_torch
from launcher.run import preflight, run
from launcher.run.resolved_request import resolve_request
from tests.run.launching import TINY, shape


def test_a_run_settles_checks_and_reads_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for home, name in (
        (plan_job, "inlined"),
        (plan_job, "ask"),
        (run, "resolve_request"),
        (run, "check_without_torch"),
    ):
        real = getattr(home, name)

        def counted(*args: Any, real: Any = real, name: str = name) -> Any:
            seen[name] += 1
            return real(*args)

        monkeypatch.setattr(home, name, counted)
    switches = tmp_path / "speed_up.json"
    switches.write_text(json.dumps({}))
    words = [*TINY, f"run_dir={tmp_path}/run", f"parallel.transformer_opt={switches}", *shape()]
    run.rehearse(compose(words))
    assert seen == {"inlined": 1, "ask": 1, "resolve_request": 1, "check_without_torch": 1}


def test_problems_that_need_no_plan_are_found_before_planning(tmp_path: Path) -> None:
    words = [*TINY, f"run_dir={tmp_path}/run", "steps=[train,save,verify]", f"steps.verify.src={tmp_path}/nowhere"]
    request = compose(words)
    asked = resolve_request(request, None)
    assert [str(p) for p in preflight.before_plan(asked)] == [
        f"steps.verify.src: {tmp_path}/nowhere: no checkpoint: no such folder"
    ]
    assert check_without_torch(asked.resolved).stage_request.sizes.grid.size == 4
