"""``debug.profiler``: a window of steps on some ranks, the files that it writes, and windows that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, events, losses, run, shape


def window(first: int, last: int, more: str = "") -> str:
    return f"debug.profiler={{steps: [{first}, {last}]{more}}}"


def calls(folder: Path, name: str, rank: int = 0) -> int:
    return sum(e.get("name") == name for e in events(folder, rank))


def test_a_window_has_its_steps_alone_on_the_ranks_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", *shape(pp=2), window(2, 3, ", ranks: [1]"), steps=6)
    assert {p.name for p in (folder / "profile").iterdir()} == {"rank1.json.gz", "rank1.txt"}

    # twice the calls of a window of one step
    one = run(tmp_path / "one", *shape(pp=2), window(4, 4, ", ranks: [1]"), steps=6)
    assert calls(folder, "Optimizer.step#AdamW.step", 1) == 2 * calls(one, "Optimizer.step#AdamW.step", 1) == 2
    assert calls(folder, "aten::mm", 1) == 2 * calls(one, "aten::mm", 1) > 0

    # the table is on the console, in the folder and on the page
    lines = (folder / "profile" / "rank1.txt").read_text().splitlines()
    assert lines[0].startswith("profile of steps 2 to 3 on rank 1, ")
    assert lines[1].split() == ["ms", "share", "calls", "operator"]
    assert len(lines) == 12
    shown = [float(line.split()[0]) for line in lines[2:]]
    assert shown == sorted(shown, reverse=True)
    assert "\n".join(lines) in capsys.readouterr().out
    assert lines[5].split()[-1] in (folder / "report.html").read_text()
    assert '<a href="profile">profile</a>' in (folder / "report.html").read_text()


def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", *shape(), steps=4)
    assert losses(run(tmp_path / "run", *shape(), window(2, 3, ", memory: true"), steps=4)) == losses(plain)


def test_on_a_cpu_memory_is_in_the_trace_and_no_snapshot_is_said_to_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "run", *shape(), window(2, 2, ", memory: true"), steps=2)
    assert calls(folder, "[memory]") > 0
    assert not list((folder / "profile").glob("*.pickle"))
    assert (
        "debug.profiler.memory: torch has no memory snapshots for cpu; the trace shows its allocations\n"
        in capsys.readouterr().out
    )


def test_a_window_that_was_trained_before_is_said_to_be_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *shape(), steps=3)
    folder = run(tmp_path / "run", *shape(), window(2, 3), "steps=[train,save]", steps=5)
    text = "debug.profiler: this start trained no step of the window (debug.profiler.steps)\n"
    assert text in capsys.readouterr().out
    assert not (folder / "profile").exists()


def test_a_training_that_ends_within_the_window_leaves_what_there_was(tmp_path: Path) -> None:
    run(tmp_path / "run", *shape(), steps=3)
    folder = run(tmp_path / "run", *shape(), window(2, 5), steps=5)
    assert (folder / "profile" / "rank0.txt").read_text().startswith("profile of steps 4 to 5 on rank 0, ")


@pytest.mark.parametrize(
    ("typed", "says", "cure"),
    [
        ("{steps: [3, 9]}", "steps: [3, 9]: the training ends after 4 steps", "{steps:[1,4]}"),
        ("{steps: [3, 5]}", "steps: [3, 5]: the training ends after 4 steps", "{steps:[2,4]}"),
        ("{steps: [3, 2]}", "steps: [3, 2]: the first step of the window comes after its last", "{steps:[2,3]}"),
        ("{ranks: [1, 4]}", "ranks: 4: the plan has 2 ranks, counted from 0", "{ranks:[1]}"),
        ("{ranks: [2]}", "ranks: 2: the plan has 2 ranks, counted from 0", "{ranks:[0]}"),
    ],
    ids=["long", "late", "backwards", "some ranks", "no rank"],
)
def test_a_window_that_cannot_be_is_refused_and_the_cure_passes(
    capsys: pytest.CaptureFixture[str], typed: str, says: str, cure: str
) -> None:
    words = [*TINY, *shape(pp=2), "train.steps=4", "show=plan"]
    assert main([*words, f"debug.profiler={typed}"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  debug.profiler.{says}\n"
        f"    set by: debug.profiler={typed} (command line)\n"
        f"    try:    'debug.profiler={cure}'\n"
    )
    assert main([*words, f"debug.profiler={cure}"]) == 0


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("{steps: [0, 3]}", "debug.profiler.steps = [0,3]: item [0] = 0 should be at least 1"),
        ("{steps: [1]}", "debug.profiler.steps"),
        ("{ranks: []}", "debug.profiler.ranks"),
        ("{step: [1, 2]}", "unknown key, did you mean 'debug.profiler.steps'?"),
        ("on", "debug.profiler"),
    ],
)
def test_invalid_profiler_settings_are_refused(capsys: pytest.CaptureFixture[str], typed: str, says: str) -> None:
    assert main([*TINY, *shape(), f"debug.profiler={typed}", "train.steps=4", "show=plan"]) == 2
    assert says in capsys.readouterr().err
