"""However the tensors of a batch are split, training equals that of one process."""

from __future__ import annotations

from typing import Any

from launcher.job.schema.job import Job
from tests.parity import own, together
from tests.tiers import some_of

CUT = {"fc1": {"matrix": [2, 2], "axes": ["x", "y"], "in": [["x", "y"], [None, "y"]]}}
"""A strategy that splits the first product by samples and by the dim that it sums over."""

STRATEGIES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "rows": ("Mlp", [4, 4], {"dataset_strategy": [[1, 4, 1], [1]]}),
    "columns": ("Mlp", [4, 4], {"dataset_strategy": [[1, 1, 4], [4]]}),
    "samples and rows": ("Mlp", [4, 4], {"dataset_strategy": [[2, 2, 1], [2]], "operators": CUT}),
    "half of the ranks": ("Mlp", [4, 4], {"dataset_strategy": [[1, 2, 1], [1]]}),
    "everything everywhere": ("Mlp", [4, 4], {"dataset_strategy": "full_batch", "operators": CUT}),
    "by names": (
        "Mlp",
        [4, 4],
        {"dataset_strategy": {"matrix": [2, 2], "axes": ["x", "y"], "in": [["x", None, "y"], ["x"]]}},
    ),
    "strided": (
        "Mlp",
        [4, 4],
        {
            "dataset_strategy": {"matrix": [2, 2], "axes": ["x", "y"], "in": [[["y", "x"], None, None], [None]]},
            "operators": CUT,
        },
    ),
    "sequences": ("Transformer", ["int64", 8], {"dataset_strategy": [[1, 4], [2, 2]]}),
    "shared weights": (
        "Mlp",
        [4, 4],
        {"dataset_strategy": [[2, 2, 1], [2]], "hsdp": {"threshold": 0}, "pipeline": {"stages": 1}},
    ),
}  # fmt: skip


def network(net: str, shape: list[Any], parallel: dict[str, Any]) -> Job:
    """Return a job over 4 ranks."""
    made = own(f"tests.extras.device_matrix.run.networks.{net}", shape, stages=1, train__batch_size=16)
    said = made.model_dump(by_alias=True)
    return Job.model_validate(said | {"parallel": said["parallel"] | parallel, "launch": {"nproc": 4}})


def test_a_batch_that_is_cut_along_any_dim_trains_as_one_process() -> None:
    cells = {name: network(*said) for name, said in some_of(STRATEGIES, one_in=2).items()}
    for name, run in together(cells).items():
        try:
            plan = run.assert_same()
        except AssertionError as error:
            error.add_note(name)
            raise
        assert plan.sharding is not None, name
