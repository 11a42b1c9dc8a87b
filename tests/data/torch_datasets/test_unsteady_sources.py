"""A Source is planned only if its samples depend on their index alone."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import job

HERE = "tests.data.torch_datasets.unsteady_sources"


def reading(name: str) -> Job:
    data = {"_target_": f"{HERE}.{name}"}
    return job(model={"_target_": "tests.optim.theirs.Net"}, data=data, security__allow=("tests",))


@pytest.mark.parametrize(
    "name", ["TorchDraws", "PythonDraws", "NumpyDraws", "Mixes", "HardensByCalls", "Remembers", "SortsLargeBatches"]
)
def test_a_source_whose_samples_depend_on_more_than_the_index_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(reading(name))
    (problem,) = caught.value.problems
    assert problem.key == "data._target_"
    assert problem.text.startswith(f"{HERE}.{name}: sample ")
    assert "so no two layouts would train the same; a Source returns samples by index alone" in problem.text


def test_a_source_that_draws_by_index_is_planned() -> None:
    plan_job(reading("Steady"))


def test_a_source_that_counts_its_calls_for_later_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(reading("HardensLate"))
    (problem,) = caught.value.problems
    assert problem.text.startswith(
        f"{HERE}.HardensLate: it counts what it reads (calls), and item 0 changes after more of them; each layout and "
        "a resumed run read another number of items; a Source returns samples by index alone"
    )
