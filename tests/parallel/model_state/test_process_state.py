"""Planning undoes what a forward changes in its process; layouts in which this is visible are refused."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.module_globals import put_back, variables
from launcher.parallel.model_state.process_state import process_state
from launcher.parallel.model_state.python_state import changed
from launcher.planner.plan_job import plan_job
from tests.parallel.process_nets import COUNTED
from tests.parity import own

TWO: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2}}


def test_settings_of_the_process_are_named_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "1")
    monkeypatch.delenv("EVEN", raising=False)
    before, filters = variables([]), list(warnings.filters)
    with put_back([]):
        os.environ |= {"ODD": "2", "EVEN": "1"}
        os.chdir(tmp_path)
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message="odd")
        assert {name for name, _ in changed(before, variables([]))} == {
            *("the environment variable ODD", "the environment variable EVEN", "the working directory"),
            *("the recursion limit of Python", "the default dtype of torch", "torch.use_deterministic_algorithms"),
        }
    assert not changed(before, variables([]))
    assert list(warnings.filters) == filters


def test_a_working_directory_that_is_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert dict(process_state())["the working directory"] is None


def net(parallel: dict[str, Any]) -> Job:
    return own("process_nets.Net", [6], stages=1, parallel=parallel)


@pytest.mark.parametrize("parallel", [{}, {"grid": {"dp_replicate": 2}}], ids=["one rank", "replicas"])
def test_planning_leaves_what_a_forward_counts_in_the_environment(
    parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = net(parallel)  # the helper runs a forward to make targets
    monkeypatch.delenv(COUNTED, raising=False)
    plan_job(job)
    assert COUNTED not in os.environ


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (TWO, "model: every call of the forward changes the environment variable {}, whose value differs in each "
              "process; keep it in a module that has a stage"),
        ({"recompute": {"modules": "middle"}},
         "parallel.recompute.modules: middle cannot be recomputed in the backward: each of its forwards changes the "
         "environment variable {} (try: parallel.recompute=null)"),
    ],
    ids=["stages", "recomputation"],
)  # fmt: skip
def test_a_layout_that_would_change_counts_in_the_environment_is_refused(parallel: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(net(parallel))
    assert str(refused.value) == text.format(COUNTED)
