"""A table of fewer rows than the data has ids is refused by the plan; a rank would stop with an IndexError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launcher.errors import RequestError, RunError
from launcher.planner.plan_job import plan_job
from launcher.runtime.training.pipeline import SamplePlace, check_ids
from tests.parallel.lookup_nets import Ids
from tests.parity import own

TOKENS = {"name": "random_tokens", "vocab_size": 9, "seq_len": 6}
OWN = {"_target_": "tests.parallel.lookup_nets.Ids"}


def planned(data: dict[str, Any], stages: int = 1, **settings: Any) -> None:
    model = {"_target_": "tests.parallel.lookup_nets.Net", **settings}
    plan_job(own("lookup_nets.Net", ["int64", 6], stages=stages, model=model, data=data))


@pytest.mark.parametrize("data", [TOKENS, OWN], ids=["tokens", "own"])
@pytest.mark.parametrize("settings", [{"rows": 8}, {"rows": 9, "shift": 1}, {"rows": 8, "bag": True}])
def test_more_ids_than_rows_are_refused(settings, data):
    most = 8 + settings.get("shift", 0)
    with pytest.raises(RequestError) as refused:
        planned(data, **settings)
    where = data.get("name") or data["_target_"]
    assert str(refused.value) == (
        f"model: embed has a table of {settings['rows']} rows, but an id of the data ({where}) is {most}; give it at "
        f"least {most + 1} rows, or use data with smaller ids"
    )


@pytest.mark.parametrize("data", [TOKENS, OWN], ids=["tokens", "own"])
@pytest.mark.parametrize("settings", [{"rows": 9}, {"rows": 10, "shift": 1}, {"rows": 9, "bag": True}])
def test_as_many_rows_as_ids_are_planned(settings, data):
    planned(data, **settings)


def test_a_table_with_too_few_rows_is_refused_on_stages():
    with pytest.raises(RequestError, match="embed has a table of 8 rows"):
        planned(OWN, stages=2, rows=8)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("how", ["index", "index_select", "gather"])
def test_a_parameter_that_is_looked_up_by_hand_is_a_table_too(how, looks):
    model = {"_target_": "tests.parallel.lookup_nets.Positions", "how": how, "looks": looks}
    plan_job(own("lookup_nets.Positions", ["int64", 6], stages=1, model={**model, "rows": 9}, data=OWN))
    with pytest.raises(RequestError, match="has a table of 8 rows, but an id of the data"):
        plan_job(own("lookup_nets.Positions", ["int64", 6], stages=1, model={**model, "rows": 8}, data=OWN))


@pytest.mark.parametrize(
    ("model", "first", "end"),
    [
        ({"_target_": "tests.parallel.lookup_nets.Net", "rows": 9}, 0, 9),
        ({"_target_": "tests.parallel.lookup_nets.Net", "rows": 10, "shift": 1}, -1, 9),
        ({"_target_": "tests.parallel.lookup_nets.Positions", "rows": 9, "how": "gather", "looks": True}, 0, 9),
        ({"_target_": "tests.parallel.lookup_nets.Positions", "rows": 9, "how": "index"}, -9, 9),
    ],
    ids=["embedding", "shifted", "gathered in a module that looks", "indexed"],
)
def test_a_rank_names_the_first_id_that_a_table_has_no_row_for(model, first, end):
    data = {**OWN, "late": 12}
    plan = plan_job(own("lookup_nets.Net", ["int64", 6], stages=1, model=model, data=data))
    (table,) = plan.observed.lookups
    assert (table.place, table.rows, table.first, table.end) == (0, model["rows"], first, end)

    source = Ids("train", 12)
    with pytest.raises(RunError) as error:
        check_ids(source.inputs(np.arange(18, 24)), np.arange(18, 24), (table,), SamplePlace("step 2", "training"))
    where = f"{table.module} has" if table.module else "the model has"
    assert str(error.value) == (
        f"step 2: an id of input 0 of training sample 20 at 4 is 12, but {where} a table of {table.rows} rows, for ids "
        f"from {first} to {end - 1}. Look at the data, or give the table at least {table.rows + 13 - end} rows"
    )
    check_ids(source.inputs(np.arange(12)), np.arange(12), (table,), SamplePlace("step 1", "training"))
