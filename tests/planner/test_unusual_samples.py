from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from launcher.planner.unusual_samples import unusual_first
from tests.parity import job


def cut(model: str, data: str, samples: int, **padding: int) -> Job:
    where = "tests.planner.rare_samples"
    arguments: dict[str, Any] = {"samples": samples, **padding}
    return job(
        model={"_target_": f"{where}.{model}", **padding}, data={"_target_": f"{where}.{data}", **arguments},
        parallel={"pipeline": {"micro_batch_num": 8}}, security__allow=("tests",), train__batch_size=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "padding"),
    [
        ("Packed", "Sequences", {}), ("Packed", "Tokens", {"padding": 0}), ("Packed", "Tokens", {"padding": 23}),
        ("Packed", "Tokens", {"padding": 11}),
        ("Bounded", "Numbers", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("samples", [300, 5000])
def test_samples_that_depend_on_one_another_in_few_batches_are_refused(model, data, padding, samples):
    with pytest.raises(RequestError, match="its output for a sample depends on the rest of its batch"):
        plan_job(cut(model, data, samples, **padding))


def test_unusual_samples_come_first():
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]).repeat(100, 1)
    x[40, 2], x[70] = 9.0, torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    ids = torch.arange(100) % 4
    places = unusual_first([x, ids], 8).tolist()
    assert places[:2] == [70, 40]
    assert len({*places}) == 8


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_equal_samples_are_taken_from_all_over(count):
    places = unusual_first([torch.zeros(20, 4), torch.zeros(20, 0)], count).tolist()
    assert places == sorted({*places})
    assert len(places) == count
