"""Code in unexpected places, and buffers that are replaced: exact or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parallel.unusual_nets import fused
from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 0, "head": 1}
SHARDED = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}
BACKWARD = (
    "model: the backward changes {}, which the forward reads, but in a pipeline other forwards run before that "
    "backward than in one process; change it in the forward"
)
LATE = "model: the forward {}, but the optimizer, the ranks and checkpoints use the parameters of the constructor; {}"
TIE = "tie or create it in the constructor, and change values in torch.no_grad(), by copy_()"
ONE = {"pipeline": {"stages": 1, "stage_config": "auto"}}
REFERS = (
    "model: head uses {} of other modules by a reference in Python, but runs on stage 1, which does not have {}; pass "
    "tensors to its forward, or put both modules on one stage"
)
REFUSED = {
    "HookCounts": ({}, BACKWARD.format("b.calls")),
    "HookCools": ({}, BACKWARD.format("warm")),
    "TensorHookCools": ({}, BACKWARD.format("warm")),
    "Equilibrium": (
        SHARDED,
        (
            "model: b: a tensor hook or backward pre-hook uses weights "
            "before level3 has gathered them again (try: "
            "parallel.hsdp.optimizer_level=level2)"
        ),
    ),
    "FunctionFades": ({}, BACKWARD.format("b.factor")),
    "GradFn": (
        {},
        (
            "parallel.pipeline.stage_config: cannot trace the code between the named "
            "modules of GradFn: it reads a tensor's grad_fn, which differs on every "
            "stage; name a larger module in stage_config, so that this code runs inside "
            "it"
        ),
    ),
    "Threads": (
        {},
        "model: the forward runs a in a separate thread, which the launcher cannot trace; call modules one after "
        "the other",
    ),
    "Yields": (
        SHARDED,
        (
            "model: b: its forward returns a generator, whose code would run after its "
            "weights have been resharded; return a list, or shard nothing (try: "
            "parallel.hsdp=null)\n"
            "model: b: its forward returns an object (generator). FSDP2 does not find the tensors or modules in it, "
            "so level3 would not gather the weights again for them; return a tuple, list or dictionary of tensors, or "
            "keep the weights gathered (try: parallel.hsdp.optimizer_level=level2)"
        ),
    ),
    "SavesInside": (
        SHARDED,
        "model: b: its forward calls state_dict() or load_state_dict(), and then FSDP2 reshards the weights; use "
        "named_parameters(), or shard nothing (try: parallel.hsdp=null)",
    ),
    "Conditional": (
        ONE,
        "model: the forward of Conditional cannot be planned in b (Linear): it calls torch's cond, which cannot run on "
        "tensors without values, as a plan has; write it in Python, or use torch.where",
    ),
    "Grows": (
        {},
        "model: the forward changes the buffer b.seen to float64 (1, 6), but checkpoints expect float64 (0, 6); "
        "allocate all of it in the constructor, or register it with persistent=False",
    ),
    "AveragesKept": (
        {},
        "model: the forward makes the buffer b.seen, but checkpoints would not contain it; allocate all "
        "of it in the constructor, or register it with persistent=False",
    ),
    "Averages": (
        SHARDED,
        "model: the forward changes the buffer b.seen from rank-local data and then reads it: each of 2 "
        "data-parallel ranks would train another model; use one data-parallel rank (try: launch.nproc=2 "
        "parallel.hsdp=null)",
    ),
    "MakesParameter": (ONE, LATE.format("makes the parameter b.late", "create it in the constructor")),
    "MakesModule": (ONE, LATE.format("makes the module late", "create it in the constructor")),
    "ReplacesParameter": (ONE, LATE.format("puts another parameter in the place of b.weight", TIE)),
    "MakesParameter ": ({}, LATE.format("makes or replaces a parameter", TIE)),
    "MakesModule ": ({}, LATE.format("makes or replaces a parameter", TIE)),
    "ReplacesParameter ": ({}, LATE.format("makes or replaces a parameter", TIE)),
    "Refers": ({}, REFERS.format("a.weight", "it")),
    "RefersToBuffer": ({}, REFERS.format("a.table", "it")),
    "RefersByCall": ({}, REFERS.format("a.weight, a.bias", "them")),
    "Single": (
        {},
        "model: Single: planning copies it with copy.deepcopy, which fails: TypeError: there can be only one "
        '(unusual_nets.py, in __deepcopy__: raise TypeError("there can be only one"))',
    ),
}


def job_with_net(net: str, parallel: dict[str, Any]) -> Job:
    pipeline = {"stages": 2, "stage_config": CUT}
    return own(f"unusual_nets.{net}", [6], stages=CUT, parallel={"pipeline": pipeline, **parallel})


@pytest.mark.parametrize("net", list(REFUSED))
def test_unusual_code_that_a_layout_would_change_is_refused(net):
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_net(net.strip(), REFUSED[net][0]))
    said = re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value))
    assert re.sub(r"\.py:\d+", ".py", said) == REFUSED[net][1]


@pytest.mark.parametrize("net", ["Refers", "RefersToBuffer", "RefersByCall", "Ensemble", "Wordless"])
def test_unusual_references_are_exact_on_one_stage(net):
    assert_parity(own(f"unusual_nets.{net}", [6], stages=1, train__batch_size=4))


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_native_code_between_modules_is_refused_however_often_it_has_run(calls):
    """TorchScript computes its own gradients after some calls; a trace would make its inputs constants."""
    for _ in range(calls):
        fused(torch.ones(2, requires_grad=True), torch.ones(2))
    with pytest.raises(RequestError, match="it runs native code, of torch"):
        plan_job(job_with_net("Scripted", {}))


@pytest.mark.parametrize("net", ["SavesInside", "Yields", "HookNotes", "Averages", "Remembers", "GrowsAside"])
def test_unusual_state_that_no_other_stage_shares_is_exact(net):
    assert_parity(own(f"unusual_nets.{net}", [6], stages=CUT, train__batch_size=4), parts=2)


def test_a_model_that_uses_torch_func_grad_is_exact_on_one_rank():
    assert_parity(own("unusual_nets.Differentiates", [6], stages=1, train__batch_size=4))


@pytest.mark.parametrize("level", ["level1", "level2"])
def test_a_hook_that_takes_gradients_is_exact_where_weights_stay_gathered(level):
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    assert_parity(own("unusual_nets.Equilibrium", [6], stages=1, parallel={"hsdp": hsdp}))


def test_empty_weights_are_exact_where_backwards_are_split():
    pipeline = {"stages": 2, "stage_config": CUT | {"none": 0, "some": 1}, "scheduler": "zero_bubble_h1"}
    job = own("unusual_nets.Empty", [6], stages=1, parallel={"pipeline": pipeline}, train__batch_size=4)
    assert_parity(job, parts=2)
