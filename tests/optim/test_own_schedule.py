"""A user's learning-rate schedule is called as it is, or the plan refuses it with the step and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.errors import Problem, RequestError, RunError
from launcher.job.schema.job import Job
from launcher.job.schema.user_class import Target
from launcher.optim import schedule as own_schedule
from launcher.optim.schedule import factors
from launcher.planner.plan_job import plan_job
from launcher.planner.trace_model import Traces
from tests.parity import job

OURS = "tests.optim.own_schedules."


def target(name: str, **arguments: Any) -> Target:
    return Target.model_validate({"_target_": OURS + name, **arguments})


def job_with_schedule(name: str, steps: int = 5, **arguments: Any) -> Job:
    schedule = {"_target_": OURS + name, **arguments}
    return job(schedule=schedule, train__steps=steps, security__allow=("tests",))


def rates(name: str, steps: int, **arguments: Any) -> list[float]:
    factor = factors(target(name, **arguments), steps, ("tests",))
    return [factor(step) for step in range(steps)]


def test_an_instance_is_called_with_the_step_and_gives_the_share():
    assert rates("InverseRoot", 4, warmup=2) == [0.5, 1.0, (2 / 3) ** 0.5, 0.5**0.5]
    plan_job(job_with_schedule("InverseRoot", warmup=2))


def test_an_argument_that_names_a_class_is_built_first():
    first = {"_target_": OURS + "InverseRoot", "warmup": 4}
    assert rates("Both", 4, first=first, at=2) == [0.25, 0.5, 0.0, 0.0]


def test_a_users_schedule_may_return_any_type_of_number():
    plan_job(job_with_schedule("Numbers", steps=7))
    found = rates("Numbers", 7)
    assert found == [1, 0.5, 0.25, 0.125, 2, 0.0625, 0]
    assert {type(r) for r in found} == {float}


SHARE = "but a factor of optim.lr must be a finite number of at least 0"
ANYWHERE = "a resumed run may begin at any step"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a function": ("function", {}, "is not a class with a method __call__"),
    "not there": (
        "InverseRoof", {}, "tests.optim.own_schedules has no 'InverseRoof', did you mean 'InverseRoot'? "
        f"(try: schedule._target_={OURS}InverseRoot)",
    ),
    "not called": ("NotCalled", {}, "is not a class with a method __call__"),
    "an argument that is not called": (
        "Both", {"first": {"_target_": OURS + "NotCalled"}, "at": 2},
        "it cannot be called with step 0: TypeError: 'NotCalled' object is not callable "
        "(own_schedules.py:N, in __call__: return self.first(step) if step < self.at else 0.0)",
    ),
    "other arguments": (
        "InverseRoot", {"warmup_steps": 2},
        "its arguments do not fit: got an unexpected keyword argument 'warmup_steps' "
        "(it takes warmup)",
    ),
    "unbuilt": (
        "Unbuilt", {},
        "cannot be built: ValueError: no such shape (own_schedules.py:N, in __init__: "
        'raise ValueError("no such shape"))',
    ),
    "leaves": (
        "Leaves", {}, "it cannot be called with step 0: SystemExit: enough (own_schedules.py:N, in __call__: "
        'raise SystemExit("enough"))',
    ),
    "too short": (
        "Table", {"rates": [1.0, 0.5]}, "it cannot be called with step 2: IndexError: list index out of range "
        "(own_schedules.py:N, in __call__: return self.rates[step])",
    ),
    "nothing": ("Gives", {"value": "None"}, f"at step 2 it returns None, {SHARE}"),
    "no number": ("Gives", {"value": "'1.0'"}, f"at step 2 it returns '1.0', {SHARE}"),
    "several": ("Gives", {"value": "[1.0, 2.0]"}, f"at step 2 it returns [1.0, 2.0], {SHARE}"),
    "negative": ("Gives", {"value": "-1e-9"}, f"at step 2 it returns -1e-09, {SHARE}"),
    "nan": ("Gives", {"value": "float('nan')"}, f"at step 2 it returns nan, {SHARE}"),
    "infinite": ("Gives", {"value": "np.float64('inf')"}, f"at step 2 it returns np.float64(inf), {SHARE}"),
    "complex": ("Gives", {"value": "1j"}, f"at step 2 it returns 1j, {SHARE}"),
    "larger than any float": (
        "Gives", {"value": "10**400"}, f"at step 2 it returns 100000000000000000...0000000000000000000, {SHARE}"
    ),
    "at the last step": ("Gives", {"value": "-1", "at": 4}, f"at step 4 it returns -1, {SHARE}"),
    "a counter": ("Counts", {}, f"at step 4 it returns 0.2 after earlier steps, but 1.0 without them; {ANYWHERE}"),
    "a cache in its class": (
        "Cached", {}, f"at step 4 it returns 0.2 after earlier steps, but 1.0 without them; {ANYWHERE}"
    ),
    "in order": (
        "InOrder", {}, "it cannot be called with step 4 first: AttributeError: 'InOrder' object has no attribute "
        "'start' (own_schedules.py:N, in __call__: return self.start / (step + 1))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_users_schedule_that_cannot_be_used_is_refused(case):
    name, arguments, why = REFUSED[case]
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_schedule(name, **arguments))
    said = re.sub(r"py:\d+", "py:N", str(refused.value))
    assert said == f"schedule._target_: {OURS}{name}: {why}"


def test_a_users_schedule_that_draws_random_numbers_is_refused():
    found = own_schedule.problem(target("Noise"), ("tests",), 50)
    assert found is not None
    assert found.text.startswith(f"{OURS}Noise: at step 49 it returns 0.")
    assert found.text.endswith(f" without them; {ANYWHERE}")


def test_steps_behind_the_last_are_not_looked_at():
    plan_job(job_with_schedule("Table", rates=[1.0] * 5))
    assert own_schedule.problem(target("Gives", value="-1", at=5), ("tests",), 5) is None


@pytest.mark.parametrize("steps", [1, 2, 999, 1000, 1001, 2500])
def test_every_step_of_a_training_is_looked_at(steps):
    for at in {0, steps // 2, steps - 1}:
        found = own_schedule.problem(target("Gives", value="None", at=at), ("tests",), steps)
        assert found == Problem("schedule._target_", f"{OURS}Gives: at step {at} it returns None, {SHARE}")


def test_of_a_very_long_one_steps_up_to_the_last(monkeypatch):
    monkeypatch.setattr(own_schedule, "MOST", 10)
    for steps in (10, 11, 35, 1001):
        last = target("Gives", value="None", at=steps - 1)
        assert own_schedule.problem(last, ("tests",), steps) is not None
        assert own_schedule.problem(target("InverseRoot"), ("tests",), steps) is None


def test_an_invalid_rate_after_the_planned_steps_ends_the_run_with_the_step():
    factor = factors(target("Ends", after=3), 3, ("tests",))
    assert factor(2) == 1.0
    with pytest.raises(RunError) as ended:
        factor(3)
    assert str(ended.value) == f"step 4: {OURS}Ends returns -1.0, {SHARE}"


def test_of_the_launchers_own_classes_none_is_built_that_cannot_be_a_schedule():
    with pytest.raises(RequestError) as refused:
        factors(Target.model_validate({"_target_": "launcher.errors.Problem", "key": "", "text": ""}), 5, ())
    assert str(refused.value) == (
        "schedule._target_: launcher.errors.Problem: of the launcher's own classes none may be named here; "
        "a class of yours may derive from this one"
    )


def test_nothing_of_a_package_that_is_not_trusted_is_built():
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_schedule("InverseRoot").model_copy(update={"security": job().security}))
    trusted = "package 'tests' is not trusted (trusted: none) (try: 'security.allow=[tests]')"
    assert str(refused.value) == f"schedule._target_: {OURS}InverseRoot: {trusted}"


def test_many_plans_try_it_once(monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(own_schedule, "problem", lambda settings, allow, steps, undone: tried.append(steps))
    traces = Traces()
    for steps in (5, 5, 7, 5):
        plan_job(job_with_schedule("InverseRoot", steps=steps), traces)
    assert tried == [5, 7]
