"""In the first step of a compiled model, ranks wait longer than usual for compilation, and for nothing else."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop
from launcher.runtime.training.compile_cache import FOLDER, keep_compiled
from launcher.steps import train
from launcher.steps.model.build_session import build
from tests.parity import job
from tests.ranks import DRAWN, on_ranks
from tests.test_parity import hsdp
from tests.tiers import ALL
from tests.tracing import TRACING

pytestmark = pytest.mark.filterwarnings(*TRACING)

USUAL_S, SLOW_S = 2, 4
LAYOUTS = {
    "stages": {"pipeline": {"stages": 2, "micro_batch_num": 2}},
    "shards": {"hsdp": hsdp(2, "level3")},
}


def slow(world: World, j: Any, plan: Any, late: bool) -> str:
    """Rank 0 is slow when it compiles for the first time or, if ``late``, before the second step."""
    from torch._dynamo.callback import callback_handler

    waits = [SLOW_S] if world.rank == 0 else []

    def wait(_: object) -> None:
        time.sleep(waits.pop() if waits else 0)

    callback_handler.register_start_callback(wait)
    live = build(world, j, plan, Path(os.devnull), drawn=DRAWN)
    loop.train(live, replace(train.loop_settings(live, j), until=1))
    if late and world.rank == 0:
        time.sleep(SLOW_S)
    try:
        loop.train(live, replace(train.loop_settings(live, j), until=2))
    except RuntimeError as error:
        return "lost" if "onnect" in str(error) or "Timed out" in str(error) else str(error)
    return "done"


def rank_outcomes(layout: str, timeout_s: float, late: bool) -> list[str]:
    how = {"backend": "eager", "timeout_s": timeout_s}
    j = job(train__compile=how, train__steps=2, parallel=LAYOUTS[layout], launch={"nproc": 2})
    return on_ranks(2, slow, j, plan_job(j), late, timeout_s=USUAL_S)


@pytest.mark.parametrize("layout", list(LAYOUTS) if ALL else [*LAYOUTS][:1])
def test_ranks_wait_for_one_that_compiles_and_later_no_longer_than_usual(layout: str) -> None:
    assert rank_outcomes(layout, 60, late=False) == ["done", "done"]
    assert rank_outcomes(layout, 60, late=True) == ["lost", "lost"]


def test_ranks_wait_for_a_compilation_no_longer_than_its_timeout() -> None:
    with pytest.raises(RanksFailed, match="rank 0 hung"):
        rank_outcomes("stages", 1, late=False)


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER, default_cache_dir())  # torch itself sets this variable
    keep_compiled()
    folder = tmp_path / "launcher" / "compile"
    assert os.environ[FOLDER] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(FOLDER, "elsewhere")
    keep_compiled()
    assert os.environ[FOLDER] == "elsewhere"


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "launcher").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(FOLDER, raising=False)
    keep_compiled()
    assert FOLDER not in os.environ
    (said,) = caplog.messages
    assert said.startswith("compiled code is not cached for the next start: ")
    assert said.endswith("; set TORCHINDUCTOR_CACHE_DIR to a folder")
