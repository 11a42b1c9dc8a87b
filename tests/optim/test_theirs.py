"""Law 11 for optimizers: every layout does what plain torch does in one process, also after a stop, or is refused."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from launcher.data.shuffle import batch_indices
from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.optim.build import scale_lr
from launcher.optim.schedule import factor
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, loop, save
from launcher.runtime.training.session import Session
from launcher.steps.certification.compare import Piece, error, pieces
from launcher.steps.model import build_session
from tests.optim import theirs
from tests.parallel.sources import Shapes
from tests.parity import job, whole
from tests.parity.reference import plain
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "stages": {"pipeline": {"stages": 2, "stage_config": {"first": 0, "second": 0, "scale": 1, "head": 1}}},
    "shards": {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level2"}},
    "operators": {
        "operators": {"first": {"weight": ["tp", None]}, "second": {"weight": [None, "tp"]}}, "grid": {"tp": 2}
    },
    "replicas": {"grid": {"dp_replicate": 2}},
}  # fmt: skip
STEPS, STOP = 4, 2

ANYWHERE: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"lr": 0.1, "momentum": 0.9}, "torch.optim.Adam": {}, "torch.optim.AdamW": {"amsgrad": True},
    "torch.optim.Adamax": {}, "torch.optim.NAdam": {}, "torch.optim.RAdam": {"lr": 0.01}, "torch.optim.ASGD": {},
    "torch.optim.Rprop": {}, "torch.optim.Adagrad": {}, "torch.optim.Adadelta": {"lr": 0.5},
    "torch.optim.RMSprop": {"momentum": 0.9, "centered": True}, "tests.optim.theirs.Lion": {},
    "tests.optim.theirs.IntStep": {}, "tests.optim.theirs.CounterInGroup": {}, "tests.optim.theirs.Swapped": {},
    "tests.optim.theirs.Rare": {}, "tests.optim.theirs.TensorRate": {}, "tests.optim.theirs.Lookahead": {},
    "tests.optim.theirs.FlatBuffer": {},
}  # fmt: skip
"""Optimizers that treat each number by itself."""
OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True}, "fused": {"fused": True}, "maximize": {"maximize": True, "foreach": True},
}  # fmt: skip
WHOLE = ("torch.optim.Adafactor", "torch.optim.Muon", *(f"tests.optim.theirs.{n}" for n in (
    "LARS", "LAMB", "Factored", "Shampoo",
)))  # fmt: skip
"""Optimizers that need full tensors."""
TOGETHER = ("tests.optim.theirs.GlobalNorm", "tests.optim.theirs.Prodigy")
"""Optimizers that read all tensors together."""
EVERYWHERE = (
    "torch.optim.AdamW", "foreach", *(f"tests.optim.theirs.{n}" for n in (
        "IntStep", "CounterInGroup", "Swapped", "Lookahead", "FlatBuffer",
    )),
)  # fmt: skip
ROWS, NOISE = "tests.optim.theirs.RowWise", "tests.optim.theirs.Noise"
FINE: dict[str, tuple[str, ...]] = (
    {
        p: tuple(LAYOUTS) if p in EVERYWHERE else ("one", ("stages", "shards")[n % 2])
        for n, p in enumerate((*ANYWHERE, *OPTIONS))
    }
    | dict.fromkeys(WHOLE, ("one", "stages", "replicas"))
    | dict.fromkeys(TOGETHER, ("one", "replicas"))
    | {ROWS: ("one", "stages", "shards", "replicas"), NOISE: ("one",)}
)
"""Optimizers that treat each number by itself work in any layout: a few are tried in each, the others in some."""
CELLS = [(name, layout) for name, layouts in some_of(FINE).items() for layout in layouts]


def job_with_optimizer(path: str, layout: str, steps: tuple[str, ...] = ("train", "save"), **changes: Any) -> Job:
    """A job for the optimizer at ``path`` or for Adam with one of ``OPTIONS``, which saves before it ends."""
    more = {"_target_": "torch.optim.Adam"} | OPTIONS[path] if path in OPTIONS else {"_target_": path}
    return job(**{
        "model": {"_target_": "tests.optim.theirs.Net", "matrices": path == "torch.optim.Muon"},
        "data": {"_target_": "tests.parallel.sources.Shapes", "shapes": [[6]]},
        "security__allow": ("tests", "torch"), "train__steps": STEPS, "train__clip_norm": None,
        "optim": {"lr": 0.05} | more | ANYWHERE.get(path, {}), "schedule": {"name": "linear", "warmup_steps": 2},
        "parallel": LAYOUTS[layout], "steps": {name: {} for name in steps},
    } | changes)  # fmt: skip


def advance(s: Session, j: Job, until: int) -> list[Piece]:
    """Take optimizer steps of the real loop, and return the weights after them."""
    while s.step < until:
        scale_lr(s.optimizer, factor(j.schedule, s.step, STEPS))
        loop.step(s, j.train.clip_norm)
        s.step += 1
    return pieces(s.model, weights=True)


def trained(world: World, cells: dict[Any, tuple[Job, Plan]], folder: Path) -> dict[Any, list[list[Piece]]]:
    """For each cell the weights of an uninterrupted run, and of runs resumed in the same layout and from one rank."""
    out = {}
    for (name, layout), (j, plan) in cells.items():
        home = folder / name / layout
        straight = build_session.build(world, j, plan, home, drawn=DRAWN)
        advance(straight, j, STOP)
        save.save(straight, None)
        found = [advance(straight, j, STEPS)]
        for before in dict.fromkeys((layout, "one")):
            again = build_session.build(world, j, plan, home, drawn=DRAWN)
            checkpoint_tensors.load(again, folder / name / before / "checkpoints" / f"step-{STOP:06d}")
            assert again.step == STOP
            found.append(advance(again, j, STEPS))
        out[name, layout] = found
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Plan, list[list[list[Piece]]]]]:
    """All cells, with ranks forked once per world size: the plan, and the results of each rank."""
    folder, out = tmp_path_factory.mktemp("cells"), {}
    made = {cell: (j := job_with_optimizer(*cell), plan_job(j)) for cell in CELLS}
    for size in (1, 2):
        mine = {cell: both for cell, both in made.items() if both[1].sizes.grid.size == size}
        ranks = on_ranks(size, trained, mine, folder, timeout_s=300)
        out |= {cell: (plan, [r[cell] for r in ranks]) for cell, (_, plan) in mine.items()}
    return out


@cache
def alone(path: str) -> dict[str, Tensor]:
    """Plain torch in one process: a loop as in any tutorial. Only its initial weights come from our code."""
    j = job_with_optimizer(path, "one")
    model, source = plain(j, plan_job(j)), Shapes([[6]], "train")
    optimizer = theirs_made(path, list(model.parameters()))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, [0.5, 1.0, 1.0, 0.0, 0.0].__getitem__)
    for step in range(STEPS):
        indices = batch_indices(0, step, 8, len(source))
        optimizer.zero_grad()
        cross_entropy(model(source.inputs(indices)[0].double()), source.targets(indices)).backward()
        optimizer.step()
        rates.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def theirs_made(path: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    arguments: dict[str, Any] = {"lr": 0.05} | ANYWHERE.get(path, {}) | OPTIONS.get(path, {})
    name = "Adam" if path in OPTIONS else path.rpartition(".")[2]
    made: torch.optim.Optimizer = getattr(theirs if "theirs" in path else torch.optim, name)(params, **arguments)
    return made


@pytest.mark.parametrize(("path", "layout"), CELLS, ids=[f"{n.rpartition('.')[2]} {x}" for n, x in CELLS])
def test_weights_are_those_of_plain_torch_and_of_a_run_that_was_stopped(results, path, layout):
    plan, ranks = results[path, layout]
    straight, again, *others = (whole(plan, [p for r in ranks for p in r[k]]) for k in range(len(ranks[0])))
    for name, weight in straight.items():
        assert torch.equal(again[name], weight), f"{name} goes on to other numbers"
    if path == NOISE:
        return
    for name, weight in alone(path).items():
        assert all(error(found[name], weight) <= 1e-12 for found in (straight, *others)), name


DEPENDS = "depends on the rest of the tensor (seen on small tensors), and"
TRAINS = "it can be used with pipeline stages and replicas, where every rank has full tensors"
CUT = {
    ("shards", False): ("first.weight, first.bias, second.weight and 4 more", "dp_shard"),
    ("shards", True): ("first.weight, second.weight, head.weight", "dp_shard"),
    ("operators", False): ("first.weight, first.bias, second.weight", "tp"),
    ("operators", True): ("first.weight, second.weight", "tp"),
}


@pytest.mark.parametrize(("path", "layout"), list(product(WHOLE, ("shards", "operators"))))
def test_a_class_that_looks_at_whole_tensors_is_refused_where_they_are_cut(path, layout):
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_optimizer(path, layout, steps=("train",)))
    names, axis = CUT[layout, path.endswith("Muon")]
    text = f"optim._target_: {path}: its update of one element of a tensor {DEPENDS} {names} would be cut over"
    cure = " (try: parallel.hsdp=null)" if layout == "shards" else ""
    assert str(refused.value) == f"{text} {axis}; {TRAINS}{cure}"


def test_the_proposed_layout_for_lamb_is_planned():
    plan_job(job_with_optimizer("tests.optim.theirs.LAMB", "shards", parallel={"hsdp": None}, launch={"nproc": 2}))


OTHERS = "its update of one tensor depends on other tensors (seen on small tensors), and over"
IN_ONE = "no rank has all of them; it can be used with replicas, where every rank has all tensors"


@pytest.mark.parametrize("path", TOGETHER)
@pytest.mark.parametrize(
    ("layout", "over"), [("stages", "pipeline stages"), ("shards", "dp_shard"), ("operators", "tp")]
)
def test_a_class_that_looks_at_all_tensors_is_refused_where_no_rank_has_them(path, layout, over):
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_optimizer(path, layout, steps=("train",)))
    assert str(refused.value) == f"optim._target_: {path}: {OTHERS} {over} {IN_ONE}"


OURS = "tests.optim.theirs."
LOST = "its state cannot be saved and restored:"
KEEP = "(seen on small tensors). Keep numbers and tensors in self.state[p] or in self.param_groups"
FAILS = "its step() without a closure fails on dense gradients:"
FREEZES = (
    "it freezes parameters (requires_grad), but shards and a resumed run would go on training them; leave out their "
    "update instead, or freeze them in the model"
)
REFUSED: dict[str, tuple[str, str, str]] = {
    "closure": ("torch.optim.LBFGS", "one",
                "its step() needs closure, but loss and gradients are computed once, before step()"),
    "sparse": ("torch.optim.SparseAdam", "one",
               f"{FAILS} RuntimeError: SparseAdam does not support dense gradients, please consider Adam instead"),
    "SAM": (OURS + "SAM", "one", f"{FAILS} AssertionError: SAM requires a closure "
            '(theirs.py:300, in step: assert closure is not None, "SAM requires a closure")'),
    "groups": (OURS + "Grouped", "one", "it cannot be constructed for this model's parameters: AssertionError: "
                                        "groups with use_muon are needed (theirs.py:307, in __init__: assert "
                                        'all(isinstance(g, dict) and \"use_muon\" in g for g in params), "groups ...)'),
    "modes": (OURS + "ScheduleFree", "one",
              "it requires train() and eval() calls around validation and saving, which the launcher does not make"),
    "no rate": (OURS + "NoRate", "one", "its groups have no numeric lr, which the schedule sets before every step"),
    "its own rate": (OURS + "OwnRate", "one", "it changes the lr of its groups, which the schedule sets before every "
                     "step"),
    "freezes": (OURS + "Freezes", "one", FREEZES), "freezes late": (OURS + "FreezesLate", "one", FREEZES),
    "idle": (OURS + "Idle", "one", "its step() changes no parameter"),
    "noise": (NOISE, "replicas", "it draws random numbers (seen on small tensors), and 2 ranks would draw other "
              "numbers than one process; use one rank"),
    "Python's noise": (OURS + "PythonNoise", "one",
                       "it draws random numbers (seen on small tensors) from a generator that torch.manual_seed "
                       "does not seed, so no run could be repeated"),
    "by id": (OURS + "ById", "stages", f"{LOST} after its state and groups are restored, it gives different "
                                       f"results, so it keeps state elsewhere {KEEP}"),
    "text": (OURS + "TextInState", "stages", f"{LOST} it keeps mode of type str, which checkpoints cannot store "
                                             f"{KEEP}"),
    "no parameter": (OURS + "GlobalState", "one", f"{LOST} it keeps state under keys that are not parameters {KEEP}"),
    "another shape": (OURS + "Flat", "shards", "it keeps both of shape [2, 8, 8] for a parameter of shape [8, 8], "
                      "which cannot be saved for parameters that are cut: first.weight, first.bias, second.weight and "
                      "4 more. Use stages and replicas, where every rank has full tensors, or keep tensors of the "
                      "parameter's shape"),
    "class": (OURS + "CountsInClass", "one",
              f"{LOST} it keeps state in tests.optim.theirs.CountsInClass.steps, outside of the object {KEEP}"),
    "ranks": (OURS + "Averages", "replicas",
              "it asks for torch.distributed.is_initialized(), but 2 ranks get another answer than one process, so "
              "another layout gives other numbers; remove it: the launcher combines samples, gradients, losses and "
              "metrics itself"),
    "columns": (ROWS, "operators", "its update of one element of a tensor depends on the rest of the tensor "
                                   "(seen on small tensors), and second.weight would be cut over tp; it can be "
                                   "used with pipeline stages and replicas, where every rank has full tensors"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "layout", "why"), list(REFUSED.values()), ids=list(REFUSED))
def test_optimizers_that_a_layout_would_change_are_refused(path, layout, why):
    more = {} if path.endswith(("NoRate", "SparseAdam")) else {"lr": 0.05}
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_optimizer(path, layout, optim={"_target_": path, **more}))
    assert str(refused.value) == f"optim._target_: {path}: {why}"


@pytest.mark.parametrize("name", ["ById", "TextInState", "GlobalState", "Flat"])
def test_an_optimizer_may_have_any_state_if_nothing_is_saved(name):
    plan_job(job_with_optimizer(OURS + name, "one" if name == "GlobalState" else "replicas", steps=("train",)))


def test_a_trial_leaves_what_a_class_counts_in_its_variables_unchanged():
    plan_job(job_with_optimizer(OURS + "CountsInClass", "one", steps=("train",)))
    assert theirs.CountsInClass.steps == 0


def test_a_piece_without_elements_is_refused_where_the_class_fails_on_it_and_the_cure_passes():
    path, shards = f"{OURS}Strict", LAYOUTS["shards"]
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_optimizer(path, "shards"))
    text = (
        "it fails on a piece without elements (seen on small tensors), and some ranks have no elements of scale.weight"
    )
    assert str(refused.value) == f"optim._target_: {path}: {text} (try: parallel.hsdp.uneven=whole)"
    plan_job(job_with_optimizer(path, "shards", parallel={"hsdp": shards["hsdp"] | {"uneven": "whole"}}))


@pytest.mark.parametrize("layout", ["one", "replicas"])
def test_a_class_that_fails_on_a_missing_gradient_is_refused_where_one_is_always_missing(layout):
    path, spare = f"{OURS}Strict", {"_target_": "tests.optim.theirs.Spare"}
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_optimizer(path, layout, model=spare))
    text = "it fails on a parameter without a gradient (seen on small tensors), and no forward uses spare.weight"
    cure = "freeze them, or let step() skip a grad of None"
    assert str(refused.value) == f"optim._target_: {path}: {text}, spare.bias; {cure}"
    plan_job(job_with_optimizer("torch.optim.Adam", layout, model=spare))
