"""A list of ties must match the ties of the model: it ties nothing and unties nothing."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from tests.plan.made import chain, job, planned, skeleton, words

KEY = "parallel.shared"
PP2 = ["launch.nproc=2", "parallel.pipeline={stages: 2, stage_config: {a: 0, b: 0, c: 1}}"]
MODEL = skeleton(
    {"a.weight": (4, 4), "b.weight": (4, 4), "b.twin": (4, 4), "c.weight": (4, 4)},
    same={"c.weight": "a.weight", "b.twin": "b.weight"},
)
GLUE = chain("a", "b", "c")
CURE = f"(try: '{KEY}=[[a.weight,c.weight]]')"

REFUSED = {
    "[]": f"a.weight = c.weight is one tensor on stages 0, 1, but is not listed {CURE}",
    "[[b.weight,b.twin]]": f"a.weight = c.weight is one tensor on stages 0, 1, but is not listed {CURE}",
    "[[a.weight]]": f"a.weight: this tensor is also named c.weight {CURE}",
    "[[a.weight,c.weight],[a.wieght]]": f"the model has no parameter 'a.wieght', did you mean 'a.weight'? {CURE}",
    "[[a.weight,c.weight,b.weight]]":
        f"a.weight and b.weight are two tensors; make them one in the model, as in b.weight = a.weight {CURE}",
}  # fmt: skip


@pytest.mark.parametrize("listed", REFUSED)
def test_a_list_that_the_model_does_not_bear_out_is_refused(listed: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(job(*PP2, f"{KEY}={listed}"), MODEL, GLUE)
    assert str(caught.value) == f"{KEY}: {REFUSED[listed]}"
    planned(job(*PP2, *words(caught.value)), MODEL, GLUE)


@pytest.mark.parametrize("listed", ["[[a.weight,c.weight]]", "[[c.weight,a.weight],[b.weight,b.twin]]"])
def test_the_right_list_is_satisfied(listed: str) -> None:
    plan = planned(job(*PP2, f"{KEY}={listed}"), MODEL, GLUE)
    found = [s for s in plan.settings if s.key == KEY]
    assert [(s.status, s.why) for s in found] == [("satisfied", "these are the ties of the model")]
    assert plan.ties == planned(job(*PP2), MODEL, GLUE).ties


def test_without_stages_there_is_nothing_that_must_be_listed() -> None:
    planned(job(f"{KEY}=[]"), MODEL, GLUE)
