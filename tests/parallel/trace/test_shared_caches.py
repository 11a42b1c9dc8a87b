"""A module that several stages contain fills a cache on each of them; other state of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

STAGES = {"a": 0, "b": 1, "head": 1}
RECOMPUTED: dict[str, Any] = {"recompute": {"modules": ["a", "b"]}}
CACHES = ["attribute", "dictionary", "buffer"]


def caches(kind: str, recomputed: bool = False) -> Job:
    model = {"_target_": "tests.parallel.cache_nets.Caches", "kind": kind}
    pipeline = {"stages": 2, "micro_batch_num": 2, "stage_config": STAGES}
    parallel = {"pipeline": pipeline} | (RECOMPUTED if recomputed else {})
    return own("cache_nets.Caches", [6], stages=STAGES, model=model, train__batch_size=8, parallel=parallel)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_of_a_module_that_two_stages_contain_is_exact(kind: str, recomputed: bool) -> None:
    assert_parity(caches(kind, recomputed), parts=2)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("data", "b changes a.shared.kept, of which each stage has a copy"),
        ("first data", "a changes a.shared.kept, of which each stage has a copy"),
        ("calls", "b changes a.shared.calls, of which each stage has a copy"),
        ("layer", "a leaves a value in a.shared.calls for another module, which may be on another stage"),
        ("first call", "a changes a.shared.calls, of which each stage has a copy"),
        ("first buffer", "a changes a.shared.filled, of which each stage has a copy"),
    ],
)
@pytest.mark.parametrize("large", [False, True], ids=["", "too large to run in memory"])
def test_other_state_of_such_a_module_is_refused(
    kind: str, text: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mixing_samples", "state_between_forwards", "run_module") if large else ():
        monkeypatch.setattr(f"launcher.parallel.trace.{module}.FEW", 10)
    with pytest.raises(RequestError) as refused:
        plan_job(caches(kind))
    assert text in str(refused.value)


def test_a_module_that_fills_a_buffer_and_only_then_uses_it_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.parallel.trace.mixing_samples.FEW", 10)
    model = {"_target_": "tests.parallel.cache_nets.Caches", "kind": "first buffer"}
    job = own("cache_nets.Caches", [6], stages=1, model=model, parallel=RECOMPUTED)
    with pytest.raises(RequestError, match=r"changes a\.shared\.scale and uses it, so recomputation would use another"):
        plan_job(job)
