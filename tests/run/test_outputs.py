"""Layouts, groups and norms that a run is asked to write beside itself, and layouts that it is held to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.checkpoint.layout.derived import of_plan
from launcher.checkpoint.layout.strategy_file import load
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.plan.partition.rank_groups import as_json
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.training.metrics import read
from tests.run.launching import TINY, run, status

SAVE, LOAD = "parallel.param_strategy.save", "parallel.param_strategy.load"


def planned(*overrides: str) -> Plan:
    return plan_job(compose([*TINY, *overrides]).job)


def test_a_run_leaves_what_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts, groups, norms = tmp_path / "new/p.json", tmp_path / "g.json", tmp_path / "norms"
    run(tmp_path / "run", f"{SAVE}={layouts}", f"parallel.group_file={groups}", "parallel.local_norm.print=true",
        f"parallel.local_norm.dump={norms}", "parallel.dataset_strategy=full_batch", steps=2)  # fmt: skip
    said = capsys.readouterr().out
    assert load(layouts) == of_plan(planned(), only_trainable=True)
    plan = planned()
    assert groups.read_text() == as_json(plan.sizes.grid, plan.ties, plan.params)
    rows = [read(norms / f"rank{rank}.jsonl") for rank in range(4)]
    assert [[row["step"] for row in of] for of in rows] == [[1, 2]] * 4
    assert f"local_norm is on: norms of each rank's own gradients are printed and written to {norms}\n" in said
    first = [f"{of[0]['norms']['embed.weight']:.4g} on rank {rank}" for rank, of in enumerate(rows)]
    assert f"local_norm, step 1: embed.weight {', '.join(first)}\n" in said


def test_a_second_run_into_the_same_folder_of_norms_starts_it_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        told = [f"parallel.local_norm.dump={tmp_path / 'norms'}", "parallel.local_norm.device=true"]
        run(tmp_path / name, *told, "launch.nproc=1", "parallel.pipeline.stages=1", "parallel.hsdp=null", steps=2)
    assert [row["step"] for row in read(tmp_path / "norms/rank0.jsonl")] == [1, 2]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The layouts of the default recipe, as a run would have written them."""
    from launcher.run.layout_files import write

    path = tmp_path / "p.json"
    job = compose([*TINY, f"{SAVE}={path}"]).job
    write(job, plan_job(job), tmp_path)
    return path


def refusal(*overrides: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        planned(*overrides)
    return caught.value


def test_the_same_layouts_are_accepted(saved: Path) -> None:
    assert [s.status for s in planned(f"{LOAD}={saved}").settings if s.key == LOAD] == ["applied"]


def test_another_layout_is_refused_by_the_name_of_its_parameter(saved: Path) -> None:
    typed = [f"{LOAD}={saved}", "parallel.hsdp.threshold=1"]
    each = ("layers.0.attn_norm.weight", "layers.0.mlp_norm.weight", "layers.1.attn_norm.weight")
    unlike = "; ".join(f'{name} has split [["dp_shard"]], here [[]]' for name in each)
    assert str(refusal(*typed)) == f"{LOAD}: {saved}: {unlike}; and 2 more"


def test_layouts_of_another_grid_are_refused(saved: Path) -> None:
    rest = "x dp_replicate 1 x dp_shard 2 x tp 1"
    text = f"its layouts are on pp 2 {rest}, this plan is on pp 1 {rest}"
    one = ["parallel.pipeline.stages=1", "launch.nproc=2"]
    assert str(refusal(f"{LOAD}={saved}", *one)) == f"{LOAD}: {saved}: {text}"


def test_layouts_of_another_model_are_refused(saved: Path) -> None:
    deeper, smaller = refusal(f"{LOAD}={saved}", "model.tied=false"), json.loads(saved.read_text())
    assert "head.weight is not in the file" in str(deeper)
    del smaller["tensors"]["norm.weight"]
    smaller["tensors"]["extra"] = smaller["tensors"]["layers.0.attn.q.weight"]
    saved.write_text(json.dumps(smaller))
    why = "norm.weight is not in the file; extra is not in the model"
    assert str(refusal(f"{LOAD}={saved}")) == f"{LOAD}: {saved}: {why}"


def test_what_is_no_layout_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    why = f"{path}: cannot be read: No such file or directory"
    assert str(refusal(f"{LOAD}={path}")) == f"{LOAD}: {why}"
    path.write_text("{")
    assert str(refusal(f"{LOAD}={path}")) == f"{LOAD}: {path}: not a strategy file: no JSON"


def test_held_out_samples_count_once_however_many_ranks_work_on_them(tmp_path: Path) -> None:
    one = ["launch.nproc=1", "parallel.pipeline.stages=1", "parallel.hsdp=null", "steps=[evaluate]"]
    up = "parallel.operators.layers.*.mlp.up={weight: [tp, null], output: [null, null, null]}"
    alone, cut = run(tmp_path / "a", *one), run(tmp_path / "b", *one, "launch.nproc=2", "parallel.grid.tp=2", up)
    found = [status(folder)["metrics"]["val_loss"] for folder in (alone, cut)]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
