"""A table of fewer rows than the data has ids is refused by the plan; a rank would stop with an IndexError."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
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
        f"model: embed has a table of {settings['rows']} rows, and an id of the data ({where}) is {most}; give it at "
        f"least {most + 1} rows, or read data of fewer tokens"
    )


@pytest.mark.parametrize("data", [TOKENS, OWN], ids=["tokens", "own"])
@pytest.mark.parametrize("settings", [{"rows": 9}, {"rows": 10, "shift": 1}, {"rows": 9, "bag": True}])
def test_as_many_rows_as_ids_are_planned(settings, data):
    planned(data, **settings)


def test_stages_are_told_too():
    with pytest.raises(RequestError, match="embed has a table of 8 rows"):
        planned(OWN, stages=2, rows=8)
