"""A forward that computes something else while traced, or when run again, is refused; other forwards are exact."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parallel import traced_nets as nets
from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 0, "head": 1}
EXACT = ["is_meta", "device", "the default device", "is_compiling", "grad mode"]


def asks(way):
    model = {"_target_": "tests.parallel.traced_nets.Asks", "way": way}
    return own("traced_nets.Asks", [6], stages=CUT, model=model, train__batch_size=4)


@pytest.mark.parametrize("way", [w for w in nets.WAYS if w not in EXACT])
def test_code_that_asks_for_the_modes_of_a_trace_is_refused(way):
    with pytest.raises(RequestError) as refused:
        plan_job(asks(way))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == (
        "parallel.pipeline.stage_config: the code between the named modules of Asks computes something else while it "
        "is traced (output 0 differs), for example because it asks for torch's modes or for the type of a tensor; "
        "name a larger module in stage_config, so that this code runs inside it"
    )


def test_a_hook_between_the_modules_that_keeps_state_is_refused():
    with pytest.raises(RequestError) as refused:
        plan_job(own("traced_nets.Projects", [6], stages=CUT, train__batch_size=4))
    assert str(refused.value) == (
        "parallel.pipeline.stage_config: the code between the named modules of Projects passes on <lambda>, whose "
        "seen['grad'] changes: all forwards would share it; name a larger module in stage_config, so that this code "
        "runs inside it"
    )


@pytest.mark.parametrize("way", EXACT)
def test_queries_that_a_trace_answers_as_a_forward_does_are_exact(way):
    assert_parity(asks(way), parts=2)


def test_code_that_draws_is_as_traced():
    plan_job(own("traced_nets.Draws", [6], stages=CUT, train__batch_size=4))


def again(ways, **recompute):
    model = {"_target_": "tests.parallel.repeated_nets.Repeated", "ways": ways}
    parallel = {"recompute": {"modules": "*", **recompute}}
    return own("repeated_nets.Repeated", [6], stages=1, model=model, train__batch_size=4, parallel=parallel)


def refused(job, cure):
    """The modules that the plan refuses to recompute, with the reasons; asserts that the cure is planned."""
    with pytest.raises(RequestError) as error:
        plan_job(job)
    pattern = r"(\S+) cannot be recomputed in the backward: (.*)"
    texts = [re.sub(r" \(the gradient of \S+ differs\)", "", problem.text) for problem in error.value.problems]
    modules, recompute = cure, job.parallel.recompute
    assert {problem.cure for problem in error.value.problems} == {f"'parallel.recompute.modules=[{','.join(cure)}]'"}
    parallel = job.parallel.model_copy(update={"recompute": recompute.model_copy(update={"modules": modules})})
    plan_job(job.model_copy(update={"parallel": parallel}))
    return dict(re.fullmatch(pattern, text).groups() for text in texts)


OTHER = "its second forward computes something else than its first"
CHANGES = "each of its forwards changes parts.{}.{}"


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_module_whose_first_forward_is_another_is_not_recomputed(policy):
    job = again(["fills_a_table", "warms_up", "fills_a_table", "warms_up"], policy=policy)
    assert refused(job, ["parts.0", "parts.2", "head"]) == {"parts.1": OTHER, "parts.3": OTHER}


def test_each_of_several_equal_modules_that_change_their_state_is_named():
    job = again(["counts", "fills_a_table", "counts"])
    out = {"parts.0": CHANGES.format(0, "calls"), "parts.2": CHANGES.format(2, "calls")}
    assert refused(job, ["parts.1", "head"]) == out


def test_each_of_several_large_equal_modules_that_change_their_state_is_named(monkeypatch):
    monkeypatch.setattr("launcher.parallel.trace.mixing_samples.FEW", 1)  # no trials on values
    test_each_of_several_equal_modules_that_change_their_state_is_named()


def test_a_module_that_takes_what_another_leaves_is_not_recomputed():
    job = again(["leaves", "takes", "fills_a_table", "leaves", "takes"])
    under = "it is called under another value of parts.{}.bag, which is no longer active when it runs again"
    assert refused(job, ["parts.2", "head"]) == {
        "parts.0": under.format(0), "parts.3": under.format(3),
        "parts.1": CHANGES.format(1, "bag"), "parts.4": CHANGES.format(4, "bag"),
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_table_that_the_first_forward_fills_is_exact(policy):
    assert_parity(again(["fills_a_table", "fills_a_table"], policy=policy), parts=1)
