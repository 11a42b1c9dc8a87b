"""Any module can be split: the gradients of its parts equal those of one process in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import fill
from launcher.parallel.stages import StagePart, split, traced
from launcher.planner.plan_job import builder, inputs, plan_job
from tests.parallel import nets
from tests.parity import assert_parity, own
from tests.tiers import some

TOKENS = ["int64", 5]
GPT = {"transformer": {"wte": 0, "wpe": 0, "drop": 0, "h": {0: 0, 1: 1, 2: 1}, "ln_f": 1}, "lm_head": 1}

NETS = {
    "long skips": own("nets.UNet", [2, 8, 8], stages={
        "down1": 0, "down2": 0, "mid": 1, "up2": 1, "merge2": 2, "up1": 2, "merge1": 3, "head": 3,
    }),
    "residual glue": own("nets.Residual", [6], stages={"first": 0, "second": 1, "third": 2, "head": 2}),
    "residual glue, cut automatically": own("nets.Residual", [6], stages=3),
    "module dict": own("nets.Dictionary", [6], stages={"net.in": 0, "net.hidden": 1, "net.out": 1}),
    "loop over layers": own("nets.Looped", [6], stages={
        "layers.[01]": 0, "norms.[01]": 0, "layers.[23]": 1, "norms.[23]": 1, "head": 1,
    }),
    "nanoGPT": own("nets.NanoGPT", TOKENS, stages=GPT),
    "nanoGPT, 3 stages, cut automatically": own("nets.NanoGPT", TOKENS, stages=3),
    "python that looks at data": own("nets.Eager", [6], stages={"a": 0, "b": 1, "head": 1}),
    "parameters in the glue of one stage": own("nets.Vision", [4, 4], stages={
        "embed": 0, "cls": 0, "pos": 0, "mix": 0, "head": 1,
    }),
    "parameters in the glue of two stages": own("nets.Vision", [4, 4], stages={
        "embed": 0, "cls": 0, "pos": 0, "mix": 1, "head": 1,
    }),
    "buffers in the glue": own("nets.Buffered", [6], stages={"a": 0, "b": 1}),
    "part of a tuple crosses": own("nets.TuplePart", [6], stages={"pair": 0, "back": 1, "head": 2}),
    "a tuple crosses": own("nets.TupleWhole", [6], stages={"pair": 0, "mid": 1, "join": 2, "head": 2}),
    "a tuple crosses, half unused": own("nets.TupleHalf", [6], stages={"pair": 0, "mid": 1, "join": 2, "head": 2}),
    "numbers cross": own("nets.Sizes", [2, 6], stages={"a": 0, "b": 1, "c": 2}),
    "a module called twice": own("nets.Twice", [6], stages={"a": 0, "shared": 1, "head": 1}),
    "an input used late": own("nets.LateInput", [6], [6], stages={"a": 0, "b": 1, "head": 2}),
    "integers cross": own("nets.Tokens", TOKENS, stages={"early": 0, "mid": 1, "late": 2, "head": 2}),
    "views cross": own("nets.Views", [4, 6], stages={"a": 0, "b": 1, "head": 2}),
    "a stage overwrites what it gets": own("nets.InPlace", [6], stages={
        "a": 0, "act": 1, "b": 1, "act2": 2, "head": 2,
    }),
    "a stage overwrites what it gets, beside a clone": own("odd_nets.InPlaceBesideClone", [6], stages={
        "a": 0, "b": 1, "head": 1,
    }),
    "frozen first stage": own("nets.FrozenFirst", TOKENS, stages={"embed": 0, "a": 0, "b": 1, "head": 2}),
    "frozen tied pair": own("nets.FrozenTied", TOKENS, stages={"embed": 0, "mid": 0, "head": 1}),
    "a table used by the glue": own("nets.Functional", TOKENS, stages={"embed": 0, "mid": 0, "norm": 1}),
    "a stage without parameters": own("nets.Bare", [6], stages={"a": 0, "act": 1, "head": 2}),
    "unused parameters": own("nets.Unused", [6], stages={"a": 0, "head": 1}),
    "tensors made in the glue": own("odd_nets.Made", [4, 6], stages={"a": 0, "b": 1, "c": 2}),
    "tensors as plain attributes": own("odd_nets.Attribute", [4, 6], stages={"a": 0, "scaled": 1, "b": 1}),
    "a dictionary crosses": own("odd_nets.Objects", [6], stages={"a": 0, "head": 1}),
    "nested results": own("odd_nets.Recurrent", [4, 6], stages={"a": 0, "rnn": 1, "head": 1}),
}  # fmt: skip
SHARDED = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}


def sharded(job: Job, **hsdp: Any) -> Job:
    """The same job with every stage on two ranks."""
    parallel = job.parallel.model_dump() | {"hsdp": SHARDED["hsdp"] | hsdp}
    return Job.model_validate(job.model_dump(by_alias=True) | {"parallel": parallel, "train": {
        "steps": 1, "batch_size": 24, "precision": "fp64",
    }})  # fmt: skip


@pytest.mark.parametrize("job", list(NETS.values()), ids=list(NETS))
def test_any_module_can_be_cut(job):
    assert_parity(job)


@pytest.mark.parametrize("job", some(NETS.values()), ids=some(NETS))
def test_any_module_can_be_cut_and_sharded(job):
    assert_parity(sharded(job))


def test_a_stage_whose_parameters_are_all_below_the_threshold_is_no_exception():
    plan, _ = assert_parity(sharded(own("nets.Dictionary", [6], stages={"net.in": 0, "net.hidden": 1, "net.out": 1}),
                                    threshold=64))  # fmt: skip
    assert not any(p.sharded for p in plan.params)


def parts(job: Job) -> tuple[torch.nn.Module, list[StagePart]]:
    """The model before the split, and all its stages as the ranks would make them."""
    plan = plan_job(job)
    model, _ = fill.from_constructor(builder(job), plan)
    tracer = traced(model, plan, inputs(job, 6))
    found = [p for pp in range(plan.sizes.grid["pp"]) for p in split(model, plan, pp, tracer)]
    return model, found


@pytest.mark.parametrize("job", some(NETS.values(), 3), ids=some(NETS, 3))
def test_names_in_the_state_dict_do_not_change(job):
    model, found = parts(job)
    names = [n for p in found for n in p.module.state_dict()]
    assert set(names) == set(model.state_dict())


def plan_and_names(job: Job) -> str:
    """Text that must be equal on all ranks: the plan, and the names in each stage, in order."""
    lines = [repr(plan_job(job))]
    for part in parts(job)[1]:
        module = part.module
        lines += [n for n, _ in (*module.named_modules(), *module.named_parameters(), *module.named_buffers())]
    return "\n".join(lines)


HASHED = some(NETS.values(), 10)
"""Nets that are planned and split in two more processes."""


def test_ranks_with_other_hashes_of_strings_gather_in_the_same_order():
    """Forked ranks have the same hashes; those that torchrun starts do not."""
    names = "HASHED, plan_and_names"
    code = f"from tests.parallel.test_split import {names}\nprint(*map(plan_and_names, HASHED), sep='\\n')"
    ranks = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (r.stdout.splitlines() for r in ranks)
    assert [r.stderr for r in ranks] == ["", ""]
    assert first == second
    assert len(first) > 10 * len(HASHED)


def test_named_modules_are_the_users_own_objects():
    model, (first, second) = parts(NETS["python that looks at data"])
    assert first.module.a is model.a
    assert second.module.b is model.b
    assert isinstance(second.module.b, nets.Picky)


def test_planning_and_cutting_leave_no_trace_in_the_users_modules():
    model, _ = parts(NETS["python that looks at data"])
    assert (model.a.ran, model.b.ran) == (0, 0)


def test_a_module_that_its_owner_put_to_sleep_stays_asleep():
    job = NETS["long skips"]
    plan = plan_job(job)
    model, _ = fill.from_constructor(builder(job), plan)
    model.mid.eval()
    split(model, plan, 1, traced(model, plan, inputs(job, 3)))
    assert [m.training for m in (model, model.down1, model.mid, model.mid[0])] == [True, True, False, False]


REFUSED = {
    "glue that differs by mode": (
        own("odd_nets.ByMode", [6], stages={"a": 0, "head": 1}),
        "model: the code between the named modules differs between training and evaluation (mul = mul(a, 2) / "
        "head = head(a)); move it into a module",
    ),
    "glue that looks at data": (
        own("odd_nets.ByData", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of ByData (odd_nets.py:177): its Python looks at data; name a "
         "larger module in stage_config, so that this code runs inside it"),
    ),
    "a forward that fails by itself": (
        own("odd_nets.TooLong", TOKENS, stages=GPT),
        "model: the forward of TooLong fails for inputs of shape (6, 5) int64: AssertionError: Cannot forward "
        "sequence of length 5, block size is only 2 (nets.py:118, in forward: assert t <= self.block_size, "
        "f\"Cannot forward sequence of length {t}, block ...)",
    ),
    "a forward that fails in one stage": (
        own("odd_nets.TooLong", TOKENS, stages=1),
        "model: the forward of TooLong fails for inputs of shape (12, 5) int64: AssertionError: Cannot forward "
        "sequence of length 5, block size is only 2 (nets.py:118, in forward: assert t <= self.block_size, "
        "f\"Cannot forward sequence of length {t}, block ...)",
    ),
    "a tensor of nobody": (
        own("odd_nets.Foreign", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Foreign (odd_nets.py:92): it uses a tensor that was not created "
         "there and is neither a parameter nor a buffer of the model; name a larger "
         "module in stage_config, so that this code runs inside it"),
    ),
    "tensors in a list": (
        own("odd_nets.Listed", [6], stages={"a": 0, "head": 1}),
        "model: masks keeps tensors in a list, which the launcher can neither fill with values nor move to a "
        "device; make each a buffer with register_buffer",
    ),
    "a parameter without a shape": (
        own("odd_nets.Lazy", [6], stages={"a": 0, "head": 1}),
        "model: a.weight has no shape before the first forward; give its module the size of its input",
    ),
    "a function around another copy of the model": (
        own("odd_nets.Closure", [6], stages={"a": 0, "head": 1}),
        "parallel.pipeline.stage_config: cannot trace the code between the named modules of Closure "
        "(odd_nets.py:245): it uses a parameter of another copy of the model, for example in a function that "
        "__init__ made and that refers to self; name a larger module in stage_config, so that this code runs inside it",
    ),
    "vmap": (
        own("odd_nets.Mapped", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Mapped (odd_nets.py:261): it calls torch.func (vmap, grad), "
         "whose tensors exist only inside of that call; name a larger module in stage_config, so "
         "that this code runs inside it"),
    ),
    "glue that seeds": (
        own("odd_nets.Seeds", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Seeds (odd_nets.py:300): it seeds torch's random stream, or "
         "restores its state; the trace does not record that; name a larger module in "
         "stage_config, so that this code runs inside it"),
    ),
    "a generator": (
        own("odd_nets.Dice", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Dice (odd_nets.py:313): it draws from a generator of its own, "
         "of which every stage would have a separate copy; name a larger module in "
         "stage_config, so that this code runs inside it"),
    ),
    "hooks on what is saved": (
        own("odd_nets.Packs", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Packs (odd_nets.py:321): it has hooks on what autograd saves "
         "(saved_tensors_hooks); the trace does not record that; name a larger module in "
         "stage_config, so that this code runs inside it"),
    ),
    "a transform of torch.func": (
        own("odd_nets.Transforms", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Transforms: it computes gradients inside of a transform of "
         "torch.func; the trace does not record that; name a larger module in "
         "stage_config, so that this code runs inside it"),
    ),
    "a look at what a view has changed": (
        own("odd_nets.WrittenByView", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of WrittenByView (odd_nets.py:351): its Python looks at data; name "
         "a larger module in stage_config, so that this code runs inside it"),
    ),
    "gradients of before": (
        own("odd_nets.ReadsGrad", [6], stages=1),
        ("model: the model's own forward reads the .grad of a weight or buffer, but each rank has only its own part "
        "of the gradient, or none yet; compute what it needs in "
         "the forward (torch.autograd.grad), or remove the read"),
    ),
    "a cache": (
        own("odd_nets.Caching", [6], stages={"a": 0, "head": 1}),
        ("parallel.pipeline.stage_config: cannot trace the code between the named "
         "modules of Caching (odd_nets.py:280): it makes a KeyCache and passes it on, "
         "so every stage would have a separate copy of it; a cache is of no use in "
         "training: set use_cache=False in the model's configuration; name a larger "
         "module in stage_config, so that this code runs inside it"),
    ),
    "two dtypes": (
        own("odd_nets.OtherDtype", [6], stages=1),
        ("model: the forward calls addmm of float64 and float32 (odd_nets.py:251), "
         "which torch rejects; weights and inputs have the dtype of train.precision, "
         "and tensors that a forward creates have torch's default, float32; create "
         "them with the dtype of a weight, as in x.to(weight.dtype)"),
    ),
    "against the flow": (
        own("odd_nets.Backwards", [6], stages={"first": 0, "last": 1}),
        "parallel.pipeline.stage_config.first: 'first' is on stage 0 but needs the output of 'last' on stage 1; data "
        "flows from lower to higher stages only (try: parallel.pipeline.stage_config.last=0 "
        "parallel.pipeline.stage_config.first=1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job", "text"), list(REFUSED.values()), ids=list(REFUSED))
def test_models_that_cannot_be_cut_are_refused_with_the_cure(job, text):
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    assert str(refused.value) == text
