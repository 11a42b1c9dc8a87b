"""A module whose backward and other forwards depend on each other is refused on stages, which reorder both."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from launcher.steps.certification.compare import error
from tests.parallel.trace.test_tensor_side_effects import alone, trained
from tests.parity import own, whole
from tests.ranks import on_ranks

USES = (
    "model: the backward of middle uses state that the last forward left behind, "
    "but a pipeline runs other forwards in between; keep that state with the call "
    "(ctx, or an argument of the hook's function)"
)
LEAVES = (
    "model: the backward of middle changes state that the next forward uses, but "
    "a pipeline runs both in another order than one process; change the state in "
    "the forward"
)


def net(how: str, stages: int, **more: Any) -> Job:
    parallel = {"pipeline": {"stages": stages, "micro_batch_num": 2}}
    model = {"_target_": "tests.parallel.entangled_nets.Net", "how": how}
    return own("entangled_nets.Net", [6], stages=stages, model=model, parallel=parallel, **more)


@pytest.mark.parametrize("how", ["function", "hook", "buffer", "closure", "class"])
def test_a_backward_that_uses_what_the_last_forward_left_is_refused(how):
    with pytest.raises(RequestError) as refused:
        plan_job(net(how, 2))
    assert USES in str(refused.value) or "differs in each process" in str(refused.value)


@pytest.mark.parametrize("how", ["leaves", "parameter", "leaves in a class"])
def test_a_backward_that_leaves_something_for_the_next_forward_is_refused(how):
    with pytest.raises(RequestError) as refused:
        plan_job(net(how, 2))
    assert LEAVES in str(refused.value)


@pytest.mark.parametrize("how", ["function", "hook", "buffer", "closure", "leaves"])
def test_in_one_stage_order_is_that_of_one_process(how):
    plan_job(net(how, 1))


@pytest.mark.parametrize("how", ["kept", "argument", "counts", "plain"])
def test_state_that_is_kept_with_its_call_is_exact_on_stages(how):
    job = net(how, 2, optim={"name": "sgd", "lr": 0.5})
    plan = plan_job(job)
    ranks = [r[how] for r in on_ranks(2, trained, {how: (job, plan)}, timeout_s=120)]
    loss, want = alone(job, plan)
    got = whole(plan, [p for _, held in ranks for p in held])
    assert abs(ranks[0][0] - loss) <= 1e-12 * abs(loss)
    assert {n: e for n, w in want.items() if not (e := error(got[n], w)) <= 1e-12} == {}
