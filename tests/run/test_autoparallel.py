"""The recipe of AutoParallel's own example: the files of its calls, and which of them the next run must follow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint import merge_pipeline_strategies
from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import meaning
from launcher.checkpoint.layout.strategy_file import load
from launcher.errors import RequestError
from launcher.extras.mindspore import strategy_file
from launcher.extras.mindspore.strategy_file import read_strategy
from launcher.extras.mindspore.to_ours import to_strategy
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.tensor_parallel import operator_strategy_file
from launcher.planner.plan_job import plan_job
from launcher.run import rank_groups, write_layout_files
from launcher.runtime.training.metrics_file import read
from tests.run.launching import losses, status

WORDS = ("recipe=mlp_autoparallel", "steps=[train]", "train.steps=2", "checkpoint.every=2")
ASKED = {"params.json", "operators.json", "groups.json", "local_norm"}


def run(folder: Path, *words: str) -> Path:
    """Run in an empty folder, and check that it leaves only ``folder`` there."""
    folder.parent.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        assert main([*WORDS, f"run_dir={folder.name}", *words]) == 0
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("autoparallel") / "first")


def norms(folder: Path) -> list[list[dict[str, object]]]:
    return [read(folder / f"local_norm/rank{rank}.jsonl") for rank in range(4)]


def test_the_files_of_autoparallel_are_written_and_the_next_run_must_follow_them(first: Path, tmp_path: Path) -> None:
    assert {p.name for p in first.iterdir()} >= ASKED
    plan = plan_job(compose(WORDS).job)
    assert load(first / "params.json") == strategy_of_plan(plan)
    assert (first / "operators.json").read_text() == operator_strategy_file.as_json(
        plan.operators, plan.sizes.grid["tp"]
    )
    assert (first / "groups.json").read_text() == rank_groups.as_json(plan.sizes.grid, plan.ties, plan.params)
    assert [[(row["step"], row.keys()) for row in rank] for rank in norms(first)] == [
        [(n, {"step", "norm"}) for n in (1, 2)]
    ] * 4

    held = [f"parallel.{what}_strategy.load={first}/{what}s.json" for what in ("param", "operator")]
    second = run(tmp_path / "second", *held)
    a, b = (json.loads((folder / "plan.json").read_text()) for folder in (first, second))
    loads = [s["key"] for s in b["settings"] if s not in a["settings"]]
    assert loads == ["parallel.param_strategy.load", "parallel.operator_strategy.load"]
    assert {k: v for k, v in a.items() if k != "settings"} == {k: v for k, v in b.items() if k != "settings"}
    assert losses(second) == losses(first)
    assert norms(second) == norms(first)


BACKBONE = (
    "parallel.pipeline.stage_config={"
    + ", ".join(
        f"_backbone.{name}: {stage}"
        for name, stage in {"flatten": 0, "layer1": 0, "relu1": 0, "layer2": 1, "relu2": 1, "layer3": 1}.items()
    )
    + "}"
)
"""The names of a WithLossCell around the network, as in AutoParallel's own example."""


def test_the_names_of_its_pipeline_are_those_of_a_loss_around_the_network() -> None:
    bare, wrapped = (plan_job(compose([*WORDS, *more]).job) for more in ((), [f"++{BACKBONE}"]))
    assert wrapped.stages == bare.stages
    assert [str(n) for n in wrapped.notes if n not in bare.notes] == [
        "parallel.pipeline.stage_config _backbone.NAME -> NAME: the names are those of a WithLossCell around the model"
    ]


def written(folder: Path, *words: str) -> tuple[Job, Plan]:
    """Write the layout files of a run without running it."""
    asked = compose([*WORDS, *words]).job
    plan = plan_job(asked)
    write_layout_files.write(asked, plan, folder)
    return asked, plan


EXAMPLE = ("parallel.param_strategy.save='run:param_{rank}.ckpt'", "parallel.group_file='run:comm_group_{rank}.ckpt'")


def test_layout_files_may_have_mindspores_format_with_one_per_rank(tmp_path: Path) -> None:
    _, plan = written(tmp_path, *EXAMPLE)
    assert {p.name for p in tmp_path.glob("*.ckpt")} == {
        f"{what}_{rank}.ckpt" for what in ("param", "comm_group") for rank in range(4)
    }
    specs = {p.name: p.spec for p in plan.params}
    stages = [read_strategy(tmp_path / f"param_{rank}.ckpt") for rank in range(4)]
    assert [file.stage for file in stages] == [0, 0, 1, 1]
    (tmp_path / "all").mkdir()
    for rank in range(4):
        shutil.copy(tmp_path / f"param_{rank}.ckpt", tmp_path / "all")
    merge_pipeline_strategies(tmp_path / "all", tmp_path / "merged.ckpt")
    back = to_strategy(read_strategy(tmp_path / "merged.ckpt"), specs)
    assert {n: meaning(e.layout) for n, e in back.entries.items()} == {p.name: meaning(p.layout) for p in plan.params}
    for rank in range(4):
        found = strategy_file.read_groups(tmp_path / f"comm_group_{rank}.ckpt")
        groups = rank_groups.groups(plan.sizes.grid, plan.ties)
        want = {ranks for group in groups for ranks in group.ranks if rank in ranks}
        assert set(found.groups.values()) == want
        assert found.restore == (rank,)  # hsdp() has sharded something on each rank


def test_one_file_for_all_ranks_holds_the_next_run_too(tmp_path: Path) -> None:
    save = [f"parallel.param_strategy.save={tmp_path}/p.ckpt", f"parallel.group_file={tmp_path}/g.ckpt"]
    _, plan = written(tmp_path, *save)
    assert set(strategy_file.read_groups(tmp_path / "g.ckpt").groups.values()) == {
        r for g in rank_groups.groups(plan.sizes.grid, plan.ties) for r in g.ranks
    }
    load_it = f"parallel.param_strategy.load={tmp_path}/p.ckpt"
    held = plan_job(compose([*WORDS, load_it]).job)
    assert [s.status for s in held.settings if s.key == "parallel.param_strategy.load"] == ["applied"]
    said = [refusal(load_it, *words) for words in (["parallel.hsdp.threshold=1"], ["launch.nproc=8"])]
    head = f"parallel.param_strategy.load: {tmp_path}/p.ckpt: "
    assert said == [
        f"{head}layer2.bias is laid out differently; layer3.weight is laid out differently",
        f"{head}its layouts are for 4 ranks, but this plan has 8",
    ]


def refusal(*words: str) -> str:
    with pytest.raises(RequestError) as caught:
        plan_job(compose([*WORDS, *words]).job)
    return str(caught.value)


def test_layouts_that_mindspore_cannot_describe_are_refused_before_the_run() -> None:
    save, odd = "parallel.param_strategy.save=run:p.ckpt", ["launch.nproc=6", "train.batch_size=48"]
    said = refusal(save, *odd, "parallel.hsdp.threshold=0")
    assert said.startswith("parallel.param_strategy.save: run:p.ckpt: MindSpore has no such layout:")
    assert said.endswith("; save it under a name that ends in .json")
    assert "layer3.bias: ragged: dim 0 of [10] does not divide into 3 parts" in said


def test_a_second_start_goes_on_with_them(first: Path, tmp_path: Path) -> None:
    again = run(shutil.copytree(first, tmp_path / "first"), "train.steps=3")
    assert status(again)["status"] == "done"
    assert [rank[:2] for rank in norms(again)] == norms(first)
    assert [[row["step"] for row in rank] for rank in norms(again)] == [[1, 2, 3]] * 4
