"""An operator without a rule works on gathered tensors; the plan says so, and ``strict`` refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job
from tests.parity import own

OPT = "parallel.transformer_opt"


class Renorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(x, 2, 0, 1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = Renorm()
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def job(switches: Any) -> Job:
    made = own(
        "x", [16], stages=1, model={"_target_": f"{__name__}.Net"}, train__batch_size=8,
        parallel={
            "pipeline": {"stages": 1},
            "operators": {"up": {"matrix": [4], "axes": ["x"], "in": [["x", None]]}},
            "transformer_opt": switches,
        },
    )  # fmt: skip
    return made.model_copy(update={"launch": made.launch.model_copy(update={"nproc": 4})})


GATHERED = "norm, 2.0 KB, no rule for aten.renorm"


@pytest.mark.parametrize("switches", [None, {"strict": False}], ids=["nothing", "false"])
def test_the_plan_names_operators_that_work_on_gathered_tensors(switches: dict[str, Any] | None) -> None:
    rows = [line.split("  ")[-1] for line in text(plan_job(job(switches))).splitlines() if "gathered: " in line]
    assert [row.strip() for row in rows] == [f"gathered: {GATHERED}"]


def test_strict_refuses_operators_on_gathered_tensors() -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job({"strict": True}))
    assert str(caught.value) == (
        f"{OPT}.strict: true: an operator works on gathered tensors: {GATHERED} (try: {OPT}.strict=false)"
    )


def test_strict_in_a_file_refuses_operators_on_gathered_tensors(tmp_path: Path) -> None:
    file = tmp_path / "speed_up.json"
    file.write_text('{"strict": true}')
    with pytest.raises(RequestError) as caught:
        plan_job(job(str(file)))
    cure = f"{OPT}={file} {OPT}.strict=false"
    text = f"{OPT}: strict = true: an operator works on gathered tensors: {GATHERED} (try: {cure})"
    assert str(caught.value) == text
