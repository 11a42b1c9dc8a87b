"""What is attached to a weight, a module or a call is kept, or the plan says why it cannot be kept."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

CUT = {"pipeline": {"stages": 2, "stage_config": {"a": 0, "b": 1, "head": 1}}}
ONE: dict[str, Any] = {"pipeline": {"stages": 1, "stage_config": "auto"}}
AGAIN = {**ONE, "recompute": {"modules": ["b"]}}
SHARDED = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}
NODE = (
    "holds an autograd node (torch::autograd::AccumulateGrad) that the constructor made, but the launcher replaces "
    "the weights of that node, so the node's hooks are not called; use register_hook or "
    "register_post_accumulate_grad_hook of the weight instead"
)
MODE, DUAL = "the mode {}", "a level of forward-mode differentiation"
OTHERS = {
    "Replaced": "another function in the place of torch.nn.functional.linear",
    "ReplacedInTorch": "another function in the place of torch.tanh",
    "Exchanged": "another function in the place of torch.tanh",
    "ReplacedMethod": "another function in the place of torch.Tensor.tanh",
    "ReplacedForward": "another forward of _Tanh",
}
GAINS = {
    "GainOfModule": "b.gain",
    "GainOfClass": "tests.parallel.attached_nets._Gained.gain",
    "GainOfFile": "tests.parallel.attached_nets.GAIN",
    "GainByCall": "b.gain",
}
UNCUT = (
    "parallel.pipeline.stage_config: cannot trace the code between the named modules of {}: it is called under {}, "
    "which its stage would not have; name a larger module in stage_config, so that this code runs inside it"
)
ONCE = (
    "parallel.recompute.modules: b cannot be recomputed in the backward: it is called under {}, which is no longer "
    "active when it runs again (try: parallel.recompute=null)"
)
REFUSED = {
    ("NodeHooked", "one"): f"model: node {NODE}",
    ("TwoHooked", "one"): f"model: a hook of a.weight {NODE}\nmodel: a hook of b.weight {NODE}",
    ("FunctionMode", "cut"): UNCUT.format("FunctionMode", MODE.format("_Halves")),
    ("DispatchMode", "cut"): UNCUT.format("DispatchMode", MODE.format("_HalvesProducts")),
    **{(net, "cut"): UNCUT.format(net, other) for net, other in OTHERS.items()},
    ("Dual", "cut"): UNCUT.format("Dual", DUAL),
    ("FunctionMode", "again"): ONCE.format(MODE.format("_Halves")),
    ("DispatchMode", "again"): ONCE.format(MODE.format("_HalvesProducts")),
    **{(net, "again"): ONCE.format(other) for net, other in OTHERS.items()},
    **{(net, "again"): ONCE.format(f"another value of {gain}") for net, gain in GAINS.items()},
    ("Dual", "again"): ONCE.format(DUAL),
    ("Slopes", "again"): (
        "parallel.recompute.modules: b cannot be recomputed in the backward: it calls rrelu, and torch's checkpoint "
        "ends the second forward before rrelu draws its slopes (try: parallel.recompute=null)"
    ),
    ("Dual", "sharded"): (
        "model: b, head: called on dual numbers (torch.autograd.forward_ad), which the gathering of weights does not "
        "differentiate; use torch.func.jvp within a module, or shard nothing (try: parallel.hsdp=null)"
    ),
    ("BufferGradient", "one"): (
        "model: b reads the .grad of a weight or buffer, but each rank has only its own part of the gradient, or none "
        "yet; compute what it needs in the forward (torch.autograd.grad), or remove the read"
    ),
    ("KeptGradient", "cut"): (
        "model: the backward of b changes state that the next forward uses, but a pipeline runs both in another order "
        "than one process; change the state in the forward"
    ),
    ("Queued", "sharded"): (
        "model: the backward reads the gradient of b.weight, before it is summed over ranks; change gradients in "
        "your own optimizer, or use one data-parallel rank (try: launch.nproc=1 parallel.hsdp=null)"
    ),
    ("HoldsTied", "cut"): (
        "model: head.0 has a Python reference to a and shares its weight a.weight, but they run on stages "
        "1 and 0, each with a copy; keep only the weight, or put both modules on one stage"
    ),
    ("Weak", "cut"): (
        "model: b uses a.weight of other modules by a reference in Python, but runs on stage 1, which does not have "
        "it; pass tensors to its forward, or put both modules on one stage"
    ),
    ("TakesOut", "one"): (
        "model: the forward removes or replaces the module b.first, but the optimizer, the ranks and checkpoints use "
        "the parameters of the constructor; create it in the constructor"
    ),
}
JVP = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
"""torch's forward mode scripts its own functions at the first use."""
LAYOUTS = {"one": ONE, "cut": CUT, "again": AGAIN, "sharded": {**ONE, **SHARDED}}
ONE_RANK = ["KeptGradient", "Queued", "HoldsTied", "Weak", "FunctionMode", "Dual", *OTHERS, *GAINS]


@pytest.mark.filterwarnings(JVP)
@pytest.mark.parametrize(("net", "layout"), list(REFUSED))
def test_attached_objects_that_a_layout_would_lose_are_refused(net, layout):
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"attached_nets.{net}", [6], stages=1, parallel=LAYOUTS[layout]))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == REFUSED[net, layout]


@pytest.mark.filterwarnings(JVP)
@pytest.mark.parametrize("net", ONE_RANK)
def test_attached_objects_are_exact_on_one_rank(net):
    assert_parity(own(f"attached_nets.{net}", [6], stages=1, train__batch_size=4))


@pytest.mark.parametrize("layout", ["cut", "again", "sharded"])
def test_a_mode_that_a_layer_enters_itself_is_exact(layout):
    job = own("attached_nets.ModeInside", [6], stages=1, parallel=LAYOUTS[layout], train__batch_size=4)
    assert_parity(job, parts=2 if layout == "cut" else 1)


@pytest.mark.parametrize("recompute", [["a", "b"], ["b"]])
def test_a_module_with_a_call_of_its_own_is_recomputed_on_stages(recompute):
    parallel = {**CUT, "recompute": {"modules": recompute}}
    assert_parity(own("attached_nets.OwnCall", [6], stages=1, parallel=parallel, train__batch_size=4), parts=2)


@pytest.mark.parametrize("layout", ["one", "cut", "sharded"])
def test_an_ensemble_over_a_base_on_meta_is_exact(layout):
    job = own("attached_nets.Ensemble", [6], stages=1, parallel=LAYOUTS[layout], train__batch_size=4)
    assert_parity(job, parts=2 if layout == "cut" else 1)


def test_recurrent_layers_that_share_a_weight_are_exact_on_shards():
    job = own("attached_nets.SharedLstm", [4, 6], stages=1, parallel=LAYOUTS["sharded"], train__batch_size=4)
    assert_parity(job)


@pytest.mark.parametrize(
    ("net", "said"),
    [
        ("Anchored", "b.start: a forward sets this Python state and later ones read it; no checkpoint stores it"),
        ("CachedProperty", "b.scale: a forward sets this Python state and later ones read it; no checkpoint"),
        ("OneShot", "a forward leaves state behind that later ones depend on, such as a hook that it removes; no"),
        ("CountsInC", "calls: the forward changes and reads it, and it is Python state; no checkpoint stores it"),
    ],
)
def test_state_that_a_resumed_run_would_set_anew_is_noted(net, said):
    assert notes(net)[0].startswith(said)


def test_a_table_that_is_the_same_again_is_not():
    assert notes("KeepsTable") == []


def notes(net: str) -> list[str]:
    plan = plan_job(own(f"attached_nets.{net}", [6], stages=1, checkpoint__every=1))
    return [note.text for note in plan.notes if note.key == "checkpoint"]
