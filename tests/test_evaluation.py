"""An evaluation has the loss of plain torch in one process and changes nothing; otherwise the plan refuses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.module_globals import put_back
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.model import build_session
from tests.parallel import evaluation_nets
from tests.parallel.sources import Labeled
from tests.parity import job
from tests.parity.reference import plain
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, 4 micro batches": {"pipeline": {"micro_batch_num": 4}},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "pp2 x shard 2, level3": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "2 replicas": {"grid": {"dp_replicate": 2}},
    "zero_bubble_v": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}},
}
DATA = {"_target_": "tests.parallel.sources.Labeled", "shape": [6], "target": [], "classes": 5}
State = dict[str, Any]


def kept(middle: str, layout: str, **more: Any) -> Job:
    model = {"_target_": "tests.parallel.evaluation_nets.Net", "middle": middle}
    more = {"data": DATA, "steps": {"train": {"kind": "train"}, "evaluate": {"kind": "evaluate"}}} | more
    return job(model=model, parallel=LAYOUTS[layout], security__allow=("tests",), **more)


def state(s: build_session.Session) -> State:
    """Return all tensors of this rank, and the Python state of its middle."""
    out: State = {}
    for part in s.model.parts:
        whole = (*part.module.named_parameters(), *part.module.named_buffers())
        out |= {n: (t.to_local() if hasattr(t, "to_local") else t).detach().clone() for n, t in whole}
        if hasattr(getattr(part.module, "middle", None), "calls"):
            out |= {"calls": part.module.middle.calls, "sizes": list(part.module.middle.sizes)}
    return out


def rank_evaluates(world: World, j: Job, plan: Plan, folder: Path) -> tuple[list[float], State, State]:
    """Return the validation losses before each of two steps, and the states after two steps with and without them."""
    ends, losses = [], []
    for looked in (True, False):
        with put_back([evaluation_nets.__name__]):
            s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
            for step in range(2):
                losses += [loop.validate(s, None)] if looked else []
                loop.step(s, None)
                s.step = step + 1
            losses += [loop.validate(s, None)] if looked else []
            ends.append(state(s))
    return losses, *ends


def held_out(j: Job, plan: Plan, count: int) -> float:
    """Return the loss of plain torch at step 0, in batches as large as a micro batch."""
    model, data = plain(j, plan).eval(), Labeled([6], [], 5, "val", held_out=count)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(*(t.split(plan.sizes.micro_batch) for t in (data.x, data.y)), strict=True):
            total += F.cross_entropy(model(x), y, reduction="sum")
    return total.item() / count


EXACT = {
    f"{middle}, {layout}": (middle, layout)
    for middle, layouts in (
        ("Counter", LAYOUTS),
        ("Cache", LAYOUTS),
        ("Awake", LAYOUTS),
        ("Untracked", LAYOUTS),
        ("Variable", ("one rank", "2 replicas")),
        ("Rows", ("one rank", "one rank, 4 micro batches", "pp2", "zero_bubble_v")),
    )
    for layout in layouts
}


@pytest.mark.parametrize("case", some(EXACT))
def test_an_evaluation_has_the_loss_of_one_process_and_changes_nothing(case: str, tmp_path: Path) -> None:
    middle, layout = EXACT[case]
    count = 16 if middle in ("Awake", "Untracked") else 13  # these need full micro batches
    j = kept(middle, layout, data=DATA | {"held_out": count})
    plan = plan_job(j)
    for losses, looked, never in on_ranks(plan.sizes.grid.size, rank_evaluates, j, plan, tmp_path):
        assert abs(losses[0] - held_out(j, plan, count)) <= 1e-12
        assert looked.keys() == never.keys()
        for name, value in looked.items():
            same = torch.equal(value, never[name]) if isinstance(value, Tensor) else value == never[name]
            assert same, f"{name}: {value} after evaluations, {never[name]} without"


@pytest.mark.parametrize(("middle", "names"), [
    ("Counter", "middle.seen: it is"), ("Cache", "middle.last, middle.quiet, middle.new: they are"),
    ("Awake", "middle.num_batches_tracked, middle.running_mean, middle.running_var: they are"),
    ("Rows", "middle.table.weight: it is"),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["one rank", "pp2"])
def test_the_plan_says_what_is_put_back(middle: str, names: str, layout: str) -> None:
    j = kept(middle, layout, data=DATA | {"held_out": 16})
    text = f"model a forward in evaluation mode changes {names} restored after each evaluation"
    assert text in [str(n) for n in plan_job(j).notes]
    silent = j.model_copy(update={"steps": {"train": j.steps["train"]}})
    assert text not in [str(n) for n in plan_job(silent).notes]


LOSS = (
    "would depend on how the held-out samples are grouped into batches; change "
    "it only while self.training, or evaluate nothing"
)
MIXED = "middle normalizes over the samples of a micro batch also in evaluation mode, and"
REFUSED = {
    "a buffer that it reads": (
        kept("Drifting", "pp2"),
        "model: in evaluation mode the forward changes the buffer middle.mean, which its output depends on: "
        f"the loss of evaluate {LOSS}",
    ),
    "the same, on one rank": (
        kept("Drifting", "one rank", train__eval_every=1, train__steps=2),
        "model: in evaluation mode the forward changes the buffer middle.mean, which its output depends on: "
        f"the loss of train.eval_every and evaluate {LOSS}",
    ),
    "what Python keeps": (
        kept("Fading", "one rank"),
        "model: in evaluation mode the forward changes middle.times, which its output depends on: "
        f"the loss of evaluate {LOSS}",
    ),
    "a weight": (
        kept("Teacher", "one rank"),
        "model: in evaluation mode the forward changes the parameter middle.slow.weight: "
        f"the loss of evaluate {LOSS}",
    ),
    "statistics of a batch that is padded": (
        kept("Untracked", "pp2"),
        f"model: {MIXED} the last of 13 held-out samples "
        "would share one with padding; let it track running statistics, or hold out a multiple of 2 samples",
    ),
    "statistics of other batches": (
        kept("Awake", "one rank", data=DATA | {"held_out": 16}, steps={
            "train": {"kind": "train"}, "save": {"kind": "save"}, "export": {"kind": "export"}}),
        f"steps.export: {MIXED} one process would group "
        "other samples together (try: steps.export.check=false)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_whose_evaluation_depends_on_state_that_it_changes_is_refused(case: str) -> None:
    j, text = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        plan_job(j)
    assert str(caught.value) == text


@pytest.mark.parametrize("middle", ["Drifting", "Teacher", "Untracked"])
def test_a_model_that_cannot_be_evaluated_may_still_be_trained(middle: str) -> None:
    plan_job(kept(middle, "one rank", steps={"train": {"kind": "train"}}))


def test_a_certificate_leaves_out_the_validation_that_hangs_on_batches() -> None:
    text = "model a forward in evaluation mode changes middle.mean: the certificate leaves the validation out"
    assert text in [str(n) for n in plan_job(kept("Drifting", "pp2", steps={"certify": {"kind": "certify"}})).notes]
