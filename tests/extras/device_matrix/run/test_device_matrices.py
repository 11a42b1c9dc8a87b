"""Random strategies over device matrices train as one process does: loss, every gradient, every buffer."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.schema.job import Job
from tests.extras.device_matrix.run.drawn_strategies import strategies
from tests.parity import own, together
from tests.tiers import some

SHAPES: dict[str, list[Any]] = {
    "Mlp": [[4, 4]],
    "Document": [[4, 4]],
    "Convolutions": [[4, 6, 6]],
    "Transformer": [["int64", 8]],
    "TwoBranches": [[12], [12]],
}
DRAWN = 40
"""How many random strategies each network gets."""
HSDP: list[dict[str, Any] | None] = [
    None,
    {"threshold": 0},
    {"threshold": 0, "optimizer_level": "level2"},
    {"threshold": 0, "optimizer_level": "level3"},
]


def network(net: str, ranks: int, stages: int = 1, **parallel: Any) -> Job:
    batch = 24 if ranks % 3 == 0 else 16
    made = own(f"tests.extras.device_matrix.run.networks.{net}", *SHAPES[net], stages=stages, train__batch_size=batch)
    said = made.model_dump(by_alias=True)
    said["parallel"] |= parallel
    mixes = net == "Convolutions"  # BatchNorm normalizes over a micro batch
    said["parallel"]["pipeline"]["micro_batch_num"] = 1 if mixes else stages
    return Job.model_validate(said | {"launch": {"nproc": ranks}})


def drawn(net: str, seed: int) -> Job:
    """Return a job over 4, 6 or 8 ranks, every third one in two stages, over all levels of hsdp."""
    ranks = (4, 8, 6)[seed % 3]
    stages = 2 if seed % 3 == 1 and net != "Convolutions" else 1  # it must have one micro batch
    job = network(net, ranks, stages, hsdp=HSDP[seed % 4])
    operators = strategies(job, ranks // stages, seed)
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"operators": operators})})


@pytest.mark.parametrize("net", SHAPES)
def test_operators_cut_at_random_train_as_one_process(net: str) -> None:
    cells = {seed: drawn(net, seed) for seed in some(range(DRAWN), one_in=13)}
    for seed, run in together(cells).items():
        try:
            run.assert_same()
        except AssertionError as error:
            error.add_note(f"{net}, seed {seed}")
            raise


DOCUMENT = {
    "matmul1": {"in": [[2, 4], [4, 1]]},
    "relu1": {"in": [[4, 1]]},
    "matmul2": {"in": [[1, 8], [8, 1]]},
    "relu2": {"in": [[8, 1]]},
}


def test_the_first_document_s_network_trains_as_one_process_on_eight_ranks() -> None:
    run = together({0: network("Document", 8, operators=DOCUMENT)})[0]
    run.assert_same()


ALONE: dict[str, dict[str, Any]] = {
    "columns": {"matmul1": {"in": [[1, 1], [1, 4]]}},
    "one rows, one columns": {"matmul1": {"in": [[1, 4], [4, 1]]}, "matmul3": {"in": [[1, 1], [1, 2]]}},
    "whole": {"matmul2": {"in": [[1, 1], [1, 1]]}},
    "samples": {"matmul2": {"in": [[4, 1], [1, 1]]}},
}
"""Strategies that one axis tp beside data-parallel ranks cannot express, or that do not use it."""


def test_slices_that_fit_no_axis_tp_train_as_one_process() -> None:
    cells = {name: network("Document", 4, operators=operators) for name, operators in ALONE.items()}
    for run in together(cells).values():
        assert run.plan.sharding is not None
        run.assert_same()
