from __future__ import annotations

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.plan.show.text import SHORT, short, text
from launcher.planner.plan_job import plan_job
from launcher.run import memory_check

WORDS = ["recipe=lm_tp2", "model.layers=2"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*WORDS, *words]) == 0
    return capsys.readouterr().out


def test_a_plan_is_shown_on_a_page_or_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_job(compose(WORDS).job)
    assert len(text(plan).splitlines()) > SHORT
    assert printed(capsys, "show=plan") == short(plan) + "\n"
    assert printed(capsys, "show=plan-full") == text(plan) + "\n"


def test_remarks_below_a_plan_fit_on_its_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "shortage", lambda *_: "memory: too little")
    lines = printed(capsys, "show=plan").splitlines()
    assert (len(lines), lines[-1]) == (SHORT, "memory: too little")
