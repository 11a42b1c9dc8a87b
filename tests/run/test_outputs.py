"""Layouts, groups and norms that a run writes to files, and layout files that a run must follow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy_file import load, text
from launcher.errors import RequestError
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.job.compose import compose
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run import write_layout_files
from launcher.run.rank_groups import as_json
from launcher.run.status_record import RunStatus, reopen
from launcher.runtime.training.metrics_file import read
from tests.run.launching import TINY, run, status
from tests.tiers import some

SAVE, LOAD = "parallel.param_strategy.save", "parallel.param_strategy.load"


def planned(*overrides: str) -> Plan:
    return plan_job(compose([*TINY, *overrides]).job)


def test_a_run_leaves_what_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts, groups, norms = tmp_path / "new/p.json", tmp_path / "g.json", tmp_path / "norms"
    run(tmp_path / "run", f"{SAVE}={layouts}", f"parallel.group_file={groups}", "parallel.local_norm.print=true",
        f"parallel.local_norm.dump={norms}", "parallel.dataset_strategy=full_batch", steps=2)  # fmt: skip
    said = capsys.readouterr().out
    assert load(layouts) == strategy_of_plan(planned(), only_trainable=True)
    plan = planned()
    assert groups.read_text() == as_json(plan.sizes.grid, plan.ties, plan.params)
    rows = [read(norms / f"rank{rank}.jsonl") for rank in range(4)]
    assert [[row["step"] for row in of] for of in rows] == [[1, 2]] * 4
    assert f"local_norm is on: norms of each rank's own gradients are printed and written to {norms}\n" in said
    first = [f"{of[0]['norms']['embed.weight']:.4g} on rank {rank}" for rank, of in enumerate(rows)]
    assert f"local_norm, step 1: embed.weight {', '.join(first)}\n" in said


def test_a_finished_run_holds_nothing_of_its_folder_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a program that continues after ``run_job`` would keep the file system from being unmounted."""
    records: list[RunStatus] = []  # keeps them alive, as a traceback would

    def keep(*args: Any, **more: Any) -> RunStatus:
        records.append(reopen(*args, **more))
        return records[-1]

    monkeypatch.setattr("launcher.run.status_record.reopen", keep)
    run(tmp_path / "run", steps=1)
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    assert records
    assert [path for path in opened if path.startswith(str(tmp_path))] == []


def test_a_second_run_into_the_same_folder_of_norms_starts_it_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        told = [f"parallel.local_norm.dump={tmp_path / 'norms'}", "parallel.local_norm.device=true"]
        run(tmp_path / name, *told, "launch.nproc=1", "parallel.pipeline.stages=1", "parallel.hsdp=null", steps=2)
    assert [row["step"] for row in read(tmp_path / "norms/rank0.jsonl")] == [1, 2]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Write the layouts of the default recipe, as a run would."""
    from launcher.run.write_layout_files import write

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
    unlike = "; ".join(f'{name} has split [["dp_shard"]], in this plan [[]]' for name in each)
    assert str(refusal(*typed)) == f"{LOAD}: {saved}: {unlike}; and 2 more"


CUT = ("launch.nproc=8", "parallel.grid.tp=2", "operators=megatron", "train.batch_size=8")
FORMS = ("p.json", "p.ckpt", "mindspore.json")


@pytest.fixture(params=some(FORMS))
def cut_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write layouts of 2 stages x 2 shards x tp 2, in each form."""
    path = tmp_path / str(request.param)
    strategy = strategy_of_plan(planned(*CUT), only_trainable=True)
    if path.name == "p.json":
        path.write_text(text(strategy, (0, 1)))
    else:
        write_strategy(path, merged_file(strategy), "json" if path.suffix == ".json" else "protobuf")
    return path


def test_operators_tp_and_shards_follow_the_layouts_of_a_file(cut_file: Path) -> None:
    told, got = planned(*CUT), planned(f"{LOAD}={cut_file}", "launch.nproc=8", "train.batch_size=8")
    assert (got.params, got.sizes.grid) == (told.params, told.sizes.grid)
    assert [s.comms for s in got.operators.spreads] == [s.comms for s in told.operators.spreads]
    bare = planned(f"{LOAD}={cut_file}", "launch.nproc=8", "train.batch_size=8", "parallel.hsdp=null")
    assert [p.layout for p in bare.params] == [p.layout for p in told.params]


def operators_file(path: Path, *words: str) -> str:
    """Write the operators of a plan of these words, and return the override that loads them."""
    j = compose([*TINY, *words, f"parallel.operator_strategy.save={path}"]).job
    write_layout_files.write(j, plan_job(j), path.parent)
    return f"parallel.operator_strategy.load={path}"


def test_operators_that_are_not_those_of_the_layouts_are_refused_with_both_names(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text(strategy_of_plan(planned(*CUT), only_trainable=True), (0, 1)))
    size = ("launch.nproc=8", "train.batch_size=8")
    up = "parallel.operators.layers.*.mlp.up"
    assert str(refusal(f"{LOAD}={path}", *size, f"{up}={{weight: [null, tp]}}")) == (
        f"{up}: layers.0.mlp.up.weight has two layouts: [null, tp] here, [tp, null] in {path} ({LOAD}) (try: '~{up}')"
    )

    # two files, and another number of slices
    cut = (
        "parallel.grid.tp=2",
        "parallel.operators.layers.*.mlp.down={weight: [tp, null], output: [null, null, null]}",
    )
    load_it = operators_file(tmp_path / "o.ms.json", *size, *cut)
    assert str(refusal(f"{LOAD}={path}", load_it, *size)) == (
        "parallel.operator_strategy.load: layers.0.mlp.down.weight has two layouts: [tp, null] here, "
        f"[null, tp] in {path} ({LOAD})"
    )
    assert str(refusal(f"{LOAD}={path}", "parallel.grid.tp=4", "launch.nproc=16")) == (
        f"{LOAD}: {path}: its layouts are cut over 2 ranks of tp, but parallel.grid.tp has 4 (try: parallel.grid.tp=2)"
    )
    assert str(refusal(f"{LOAD}={path}", "parallel.operators.head={in: [[1,1,1],[4,1]]}", "launch.nproc=16")) == (
        f"{LOAD}: {path}: its layouts are cut over 2 ranks of tp, but parallel.operators has 4"
    )


def test_layouts_of_another_grid_are_refused(saved: Path) -> None:
    rest = "x dp_replicate 1 x dp_shard 2 x tp 1"
    why = f"its layouts are for pp 2 {rest}, but this plan has pp 1 {rest}"
    one = ["parallel.pipeline.stages=1", "launch.nproc=2"]
    assert str(refusal(f"{LOAD}={saved}", *one)) == f"{LOAD}: {saved}: {why}"


def test_layouts_of_another_model_are_refused(saved: Path) -> None:
    deeper, smaller = refusal(f"{LOAD}={saved}", "model.tied=false"), json.loads(saved.read_text())
    assert "head.weight is not in the file" in str(deeper)
    del smaller["tensors"]["norm.weight"]
    smaller["tensors"]["extra"] = smaller["tensors"]["layers.0.attn.q.weight"]
    saved.write_text(json.dumps(smaller))
    why = "norm.weight is not in the file; extra is not in the model"
    assert str(refusal(f"{LOAD}={saved}")) == f"{LOAD}: {saved}: {why}"


def test_files_that_are_no_layout_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    why = f"{path}: cannot be read: No such file or directory"
    assert str(refusal(f"{LOAD}={path}")) == f"{LOAD}: {why}"
    path.write_text("{")
    assert str(refusal(f"{LOAD}={path}")) == f"{LOAD}: {path}: not a strategy file: not JSON"


def test_held_out_samples_count_once_however_many_ranks_work_on_them(tmp_path: Path) -> None:
    one = ["launch.nproc=1", "parallel.pipeline.stages=1", "parallel.hsdp=null", "steps=[evaluate]"]
    up = "parallel.operators.layers.*.mlp.up={weight: [tp, null], output: [null, null, null]}"
    alone, cut = run(tmp_path / "a", *one), run(tmp_path / "b", *one, "launch.nproc=2", "parallel.grid.tp=2", up)
    found = [status(folder)["metrics"]["val_loss"] for folder in (alone, cut)]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
