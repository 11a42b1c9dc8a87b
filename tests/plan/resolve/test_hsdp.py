from __future__ import annotations

import pytest

from launcher.plan.show.text import text
from tests.plan.made import chain, job, planned, skeleton

UNSHARDED = {
    "threshold=65536": "the largest has 128.0 KB, parallel.hsdp.threshold is 65536 KB",
    "threshold=0 parallel.hsdp.uneven=whole": "none of them can be cut over the ranks that share the weights",
}


@pytest.mark.parametrize("asked", UNSHARDED)
def test_a_level_of_which_nothing_comes_says_why(asked: str) -> None:
    rows = 513 if "uneven" in asked else 512
    model = skeleton({"a.weight": (rows, 64), "b.weight": (rows, 64)})
    j = job("launch.nproc=2", "parallel.hsdp={}", *f"parallel.hsdp.{asked}".split())
    made = planned(j, model, chain("a", "b"))
    if "uneven" not in asked:
        assert [(s.key, s.status) for s in made.settings] == [("parallel.hsdp.optimizer_level", "degraded")]
    (found,) = (s for s in made.settings if s.key == "parallel.hsdp.optimizer_level")
    assert found.why == f"no parameter is sharded: {UNSHARDED[asked]}; every rank keeps all of them"
    assert "hsdp      level1: no parameter is sharded over 2 ranks\n" in text(made)
