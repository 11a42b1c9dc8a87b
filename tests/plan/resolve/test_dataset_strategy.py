"""Slices of a batch that a layout can produce."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import check_without_torch, resolve_job
from tests.plan.made import job, words

KEY = "parallel.dataset_strategy"

REFUSED = {
    "[[2,1],[1,1]]": "[[2,1],[1,1]]: dim 0 is cut into 1 and into 2 slices, but inputs and targets of a sample must "
    "stay together",
    "[[3,1],[3,1]]": "[[3,1],[3,1]]: dim 0 is cut into 3 slices, but their number must divide the 4 data-parallel "
    "ranks; use one of 1, 2, 4 "
    f"(try: '{KEY}=[[2,1],[2,1]]')",
    "[[4,1],[4]]": "[[4,1],[4]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims "
    f"(try: '{KEY}=[[4,1],[4,1]]')",
    "[[4,1]]": "[[4,1]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims "
    f"(try: '{KEY}=[[4,1],[4,1]]')",
    "[]": "[]: should be one list per tensor, with one number of slices per dim",
    "[[]]": "[[]]: should be one list per tensor, with one number of slices per dim",
    "[[1,2],[]]": "[[1,2],[]]: should be one list per tensor, with one number of slices per dim",
    "[[1,2]]": "[[1,2]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims (try: "
    f"'{KEY}=[[1,2],[1,1]]')",
    "[[1,2,2],[1,1]]": "[[1,2,2],[1,1]]: a batch has 2 tensors: input 0 has 2 dims, the target has 2 dims",
    "{matrix:[2,2],axes:[x,y]}": "{matrix:[2,2],axes:[x,y]}: should be a layout such as {matrix: [2, 4], axes: [x, "
    "y], in: [[x, y], [x]]}, with one list per tensor",
    "{matrix:[2,2],axes:[x,y],in:[[x,y],[x]]}": "{matrix:[2,2],axes:[x,y],in:[[x,y],[x]]}: a batch has 2 tensors: "
    "input 0 has 2 dims, the target has 2 dims",
}  # fmt: skip


@pytest.mark.parametrize("strategy", REFUSED)
def test_slices_that_cannot_be_handed_out_are_refused_and_the_cure_accepted(strategy: str) -> None:
    typed = [f"{KEY}={strategy}", "launch.nproc=4"]
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(*typed)))
    assert str(caught.value) == f"{KEY}: {REFUSED[strategy]}"
    if "try: " in REFUSED[strategy]:
        check_without_torch(resolve_job(job(*typed, *words(caught.value))))
