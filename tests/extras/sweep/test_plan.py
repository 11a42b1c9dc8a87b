"""``sweep.plan=true`` predicts each cell in this process; nothing runs and nothing is written."""

from __future__ import annotations

from launcher.__main__ import main
from tests.extras.sweep.test_settings import LINE

GRID = (
    *LINE, "launch.nproc=2", "cluster=h100_sxm", "parallel.pipeline.micro_batch_num=4",
    "parallel.hsdp={shard_size: -1, threshold: 0}",
    "parallel.pipeline.stages=1,2,3", "parallel.pipeline.scheduler=1f1b,gpipe", "sweep.plan=true",
)  # fmt: skip


def test_cells_are_planned_and_sorted_by_what_a_step_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*GRID, "data.seq_len=16"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["cell", "stages", "scheduler", "runs", "memory_mb", "bubble", "step_ms"]
    cells, reasons = [row.split() for row in rows if row[2].isdigit()], [row for row in rows if not row[2].isdigit()]
    assert {row[0] for row in cells} == {"0", "1", "2", "3"}
    took = [float(row[6]) for row in cells]
    assert took == sorted(took)
    assert reasons == [
        "  cannot run: launch.nproc: 2: cannot be divided evenly into 3 pipeline stages (cells 4, 5)",
    ]
    assert list(tmp_path.iterdir()) == []


def test_cells_that_are_the_same_run_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    same = ("parallel.hsdp.shard_size=-1,2", "parallel.pipeline.micro_batch_num=1,null")
    assert main([*GRID[:-3], *same, "sweep.plan=true"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0]: " ".join(row.split()[3:5]) for row in rows}["0"].startswith("yes")
    assert sorted(row.split()[3:5][0] for row in rows) == ["as", "as", "as", "yes"]


def test_when_no_cell_can_run_that_is_what_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*GRID[:-3], "parallel.pipeline.stages=3,5", "sweep.plan=true"]) == 2
    told = capsys.readouterr().err
    assert "launch.nproc = 2: cannot be divided evenly into 3 pipeline stages" in told
    assert "launch.nproc = 2: cannot be divided evenly into 5 pipeline stages" in told


def test_a_recipe_may_say_what_varies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    axes = "{optim.lr: [0.001, 0.003], parallel.pipeline.scheduler: [1f1b, gpipe], optim.weight_decay: 'range(0,2)'}"
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - lm_single\nsweep:\n  over: {axes}\n")
    line = ("-m", "recipe=mine.yaml", *LINE[2:], "sweep.plan=true")
    assert main([*line, "optim.lr=0.1"]) == 0  # typed words replace those in the file
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["cell", "scheduler", "weight_decay", "runs"]
    assert {tuple(row.split()[1:3]) for row in rows} == {(s, d) for s in ("1f1b", "gpipe") for d in "01"}
    assert main([*line]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
