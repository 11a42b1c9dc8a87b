"""Which modules ``parallel.recompute`` selects, and what it refuses, with a cure that works."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import job, own

KEY = "parallel.recompute.modules"
CUT = {
    "embed": 0, "layers.0": 0, "layers.1.attn": 0, "layers.1.attn_norm": 0, "layers.1.mlp": 1, "layers.1.mlp_norm": 1,
    "layers.2": 1, "layers.3": 1, "norm": 1, "head": 1,
}  # fmt: skip


def job_with_recompute(modules: Any, pipeline: dict[str, Any] | None = None, **more: Any) -> Job:
    return job(parallel={"recompute": {"modules": modules, **more}, "pipeline": pipeline or {}})


def theirs(net: str, modules: Any, *shapes: list[Any], **more: Any) -> Job:
    model = {"_target_": f"tests.parallel.{net}"}
    return own("", *shapes, stages=1, model=model, parallel={"recompute": {"modules": modules, **more}})


CHOSEN: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "a glob, the outermost": ("layers.*", {}, {f"layers.{n}": "" for n in range(4)}),
    "every other": ("layers.*", {"every": 2}, {"layers.0": "", "layers.2": ""}),
    "parts": (["layers.*.attn", "layers.3"], {}, {f"layers.{n}.attn": "" for n in range(3)} | {"layers.3": ""}),
    "a policy each": (
        {"layers.*": "full", "layers.1": "selective"}, {"keep": ["matmul"]},
        {"layers.0": "", "layers.1": "matmul", "layers.2": "", "layers.3": ""},
    ),
    "all that is called": ("*", {}, dict.fromkeys(("embed", *(f"layers.{n}" for n in range(4)), "norm", "head"), "")),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_names_and_globs_choose_modules(case):
    modules, more, chosen = CHOSEN[case]
    plan = plan_job(job_with_recompute(modules, **more))
    assert {r.module: ",".join(r.keep) for r in plan.recomputed} == chosen


REFUSED: dict[str, tuple[Any, str]] = {
    "nobody": (
        lambda: job_with_recompute("blocks.*"),
        f"{KEY}: blocks.*: no module has this name; modules are embed, layers, norm, head",
    ),
    "nearly somebody": (
        lambda: job_with_recompute({"layer.*": "full", "head": "selective"}),
        f"{KEY}: layer.*: no module has this name; modules are embed, layers, norm, head "
        f"(try: '{KEY}={{layers.*:full,head:selective}}')",
    ),
    "without the module around it": (
        lambda: job_with_recompute(["0.mlp"]),
        f"{KEY}: 0.mlp: no module has this name; modules are layers.0.mlp, layers.1.mlp, layers.2.mlp "
        f"(try: '{KEY}=[layers.0.mlp]')",
    ),
    "a list": (
        lambda: job_with_recompute("layers"),
        f"{KEY}: layers: a list of modules, which is not called itself; name modules inside it "
        f"(try: '{KEY}=layers.*')",
    ),
    "over stages": (
        lambda: job_with_recompute("layers.*", {"stages": 2, "stage_config": CUT}),
        f"{KEY}: stages divide layers.1 (into layers.1.attn, layers.1.attn.k, layers.1.attn.o, layers.1.attn.q, .., "
        "layers.1.mlp.gate, layers.1.mlp.up, layers.1.mlp_norm), so no rank runs all of it; name modules inside it "
        f"(try: '{KEY}=[layers.0,layers.1.*,layers.2,layers.3]')",
    ),
    "a counter": (
        lambda: theirs("recompute_nets.Counting", ["first", "counter", "head"], [6]),
        f"{KEY}: counter cannot be recomputed in the backward: each of its forwards changes counter.calls "
        f"(try: '{KEY}=[first,head]')",
    ),
    "a generator": (
        lambda: theirs("recompute_nets.Noisy", ["first", "noisy", "head"], [6], policy="selective"),
        f"{KEY}: noisy cannot be recomputed in the backward: each of its forwards changes noisy.noise "
        f"(try: '{KEY}=[first,head]')",
    ),
    "a teacher": (
        lambda: theirs("recompute_nets.Taught", ["student"], [6]),
        (f"{KEY}: student cannot be recomputed in the backward: the model changes "
         "student.teacher.weight and uses it, so recomputation would use another "
         "value (try: parallel.recompute=null)"),
    ),
    "its input": (
        lambda: theirs("recompute_nets.Overwriting", ["act"], [6]),
        f"{KEY}: act cannot be recomputed in the backward: it changes an input in place; leave act out",
    ),
    "what is kept": (
        lambda: theirs("recompute_nets.Recurrent", ["rnn"], [3, 6], policy="selective"),
        (f"{KEY}: rnn cannot be recomputed in the backward: it changes the result of "
         "addmm in place, which must be kept; leave rnn out"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_be_recomputed_are_refused(case):
    made, text = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        plan_job(made())
    assert str(caught.value) == text


def test_the_cure_of_a_module_over_stages_is_planned():
    plan = plan_job(
        job_with_recompute(["layers.0", "layers.1.*", "layers.2", "layers.3"], {"stages": 2, "stage_config": CUT})
    )
    assert {"layers.0", "layers.1.attn", "layers.1.mlp"} <= {r.module for r in plan.recomputed}


def uncut(modules: Any, stages: int) -> Job:
    parallel = {"recompute": {"modules": modules}, "pipeline": {"stages": stages}}
    model = {"_target_": "tests.parallel.recompute_nets.Normalized"}
    return own("", [6], stages=stages, model=model, parallel=parallel)


def test_automatic_stages_leave_in_one_piece_what_runs_again():
    plan = plan_job(uncut("blocks.*", 3))
    assert [r.module for r in plan.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {f"blocks.{n}" for n in range(3)} <= {m for s in plan.stages for m in s.modules}
    assert (
        "parallel.pipeline.stage_config auto: blocks.0 .. blocks.2 stay on one stage each, because recomputed modules "
        "are not cut" in [str(n) for n in plan.notes]
    )


def test_where_that_leaves_too_few_pieces_it_is_refused():
    with pytest.raises(RequestError) as caught:
        plan_job(uncut("blocks.*", 6))
    assert str(caught.value).startswith(f"{KEY}: stages divide blocks.1 (into blocks.1.0 .. blocks.1.2), so no rank ")
