"""Sparse tensors that a forward makes are measured by their parts."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import RequestError
from launcher.parallel.dispatch.modes import sparse_parts
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

STAGES = {"a": 0, "spread": 0, "head": 1}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_indices_and_values_are_the_parts(layout: str) -> None:
    made = torch.eye(4).to_sparse(layout=getattr(torch, layout), blocksize=(2, 2) if "_bs" in layout else None)
    *indices, values = sparse_parts(made)
    assert len(indices) == (1 if layout == "sparse_coo" else 2)
    assert values.sum() == 4


def test_a_module_that_makes_sparse_tensors_is_planned_and_trained_on_stages() -> None:
    assert_parity(own("sparse_nets.Net", [6], stages=STAGES))


def test_code_between_modules_that_makes_them_is_refused_for_what_it_is() -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(own("sparse_nets.Between", [6], stages={"a": 0, "head": 1}))
    assert str(refused.value) == (
        "parallel.pipeline.stage_config: cannot trace the code between the named modules of Between "
        "(sparse_nets.py:42): it computes with sparse tensors, which torch cannot do without values; name a larger "
        "module in stage_config, so that this code runs inside it"
    )
