"""A run that does not fit in the memory of this machine is refused before it starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.fits_free_memory import Free
from launcher.planner.plan_job import plan_job
from launcher.run import memory_check
from launcher.run.launch import Start
from launcher.runtime import free_memory
from tests.run.launching import ROOT, TINY, started, status

HUGE = (*TINY, "model=lm", "model.dim=32768", "model.heads=64", "model.layers=16", "data.vocab_size=32768",
        "train.steps=1")  # fmt: skip
HERE = Start("spawn", "cpu", None, ())


def tiny(*overrides: str) -> Job:
    return compose([*TINY, "train.steps=1", *overrides]).job


def having(monkeypatch: pytest.MonkeyPatch, *, mb: float, devices: tuple[int, ...] = ()) -> None:
    there = Free(int(mb * 2**20), devices=devices, kind="cuda")
    monkeypatch.setattr(free_memory, "ram", lambda: there)
    monkeypatch.setattr(free_memory, "available_memory", lambda ranks, device: there)


def test_terabytes_are_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HUGE, f"run_dir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    head = "does not fit: ranks 0-3 need"
    assert re.search(
        rf"launch\.check_memory: {head} [\d.]+ TB, [\d.]+ [MG]B are free on this machine.*; "
        r"launch\.check_memory=false starts it anyway\n",
        said,
    )
    assert "try:" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_plan_may_be_for_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HUGE, "show=plan"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"does not fit: ranks 0-3 need [\d.]+ TB, [\d.]+ [MG]B are free on this machine.*", last)
    for elsewhere in ("launch.nnodes=2", "launch.mode=external", "launch.check_memory=false"):
        more = ["launch.nproc=2"] if "nnodes" in elsewhere else []
        assert main([*HUGE, "show=plan", elsewhere, *more]) == 0
        assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize("cluster", ["cluster=h100_sxm", "cluster=ascend_910b", "cluster.memory_gb=100000"])
def test_a_plan_for_a_cluster_is_not_judged_by_the_memory_of_this_machine(
    capsys: pytest.CaptureFixture[str], cluster: str
) -> None:
    assert main([*HUGE, "show=plan-full", cluster]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall("fits: |does not fit: ", printed)) == 1
    assert "free on this machine" not in printed


LIMIT = """
mount --bind {fake} /proc/meminfo && exec {python} -m launcher {words}
"""


def test_a_machine_with_less_memory_refuses_what_another_does(tmp_path: Path) -> None:
    """/proc/meminfo is replaced, because a limit of the address space (ulimit -v) does not change the free memory."""
    fake = tmp_path / "meminfo"
    fake.write_text("MemTotal:  8000000 kB\nMemAvailable:  120000 kB\n")
    words = " ".join([*(w for w in TINY), f"run_dir={tmp_path}/run", "train.steps=1"])
    script = LIMIT.format(fake=fake, python=sys.executable, words=words)
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts of its own for a process: {done.stderr.strip()}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"ranks 0-3 need 12\d\.\d MB, 117\.2 MB are free on this machine;", done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("mb", "note"), [
    (1000, r"fits: 12\d\.\d of 1000\.0 MB free on this machine"),
    (200, r"fits: 12\d\.\d of 200\.0 MB free on this machine; it may take 2\.2 times that, "
          r"because the C library keeps freed memory"),
], ids=["enough", "tight"])  # fmt: skip
def test_a_start_says_how_much_it_takes(mb: float, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, mb=mb)
    (said,) = memory_check.checked(tiny(), plan_job(tiny()), HERE).notes
    assert re.fullmatch(note, said)


def test_with_check_memory_false_a_run_that_does_not_fit_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, mb=100)
    job = tiny("launch.check_memory=false")
    (said,) = memory_check.checked(job, plan_job(job), HERE).notes
    told = r"launch\.check_memory=false: does not fit: ranks 0-3 need 12\d\.\d MB, 100\.0 MB are free on this machine"
    assert re.fullmatch(told, said)


def test_the_cure_is_a_layout_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the cure pasted, the same memory is enough."""
    words = [*(w for w in TINY if "hsdp" not in w), "recipe=lm_single", "steps=[train]", "launch.nproc=2"]
    words += ["model.dim=512", "data.vocab_size=4096"]
    level = "parallel.hsdp.shard_size=-1"
    whole, cut = (sum(m.total for m in plan_job(compose([*words, "train.steps=1", w]).job).estimate.memory)
                  for w in ("seed=0", level))  # fmt: skip
    assert cut < whole
    having(monkeypatch, mb=(cut + whole) / 2 / 2**20 + 64)
    refused = [*words, "train.steps=1", f"run_dir={tmp_path}/run"]
    assert main(refused) == 2
    assert f"    try:    {level}\n" in capsys.readouterr().err
    from launcher.__main__ import check_words

    check_words([*refused, level])


def test_the_copy_that_a_thread_writes_from_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has the weights and both states of the optimizer, over all ranks."""
    found = []
    for words in ((), ("checkpoint.async=true", "checkpoint.every=1")):
        job = tiny("recipe=lm_single", "steps=[train]", "model.dim=256", "data.vocab_size=4096", *words)
        plan = plan_job(job)
        fitting = memory_check._fit(job, plan, (0,), Free(1 << 40))
        assert fitting is not None
        found.append(fitting.needed)
    assert found[1] - found[0] == 3 * sum(p.spec.nbytes for p in plan.params if not p.buffer)


def test_a_device_is_compared_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, mb=10, devices=(1 << 30, 1 << 30, 1 << 10, 1 << 30))
    job = tiny()
    with pytest.raises(ValueError, match=r"rank 2 needs \d+\.\d KB, 1\.0 KB are free on cuda:2;"):
        memory_check.checked(job, plan_job(job), Start("spawn", "cuda", None, ()))


TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(("rank", "here"), [("0", (0, 1)), ("3", (2, 3))])
def test_of_an_outer_launcher_the_ranks_of_this_machine_count(
    rank: str, here: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "RANK": rank, "LOCAL_RANK": str(int(rank) % 2)}.items():
        monkeypatch.setenv(name, value)
    assert memory_check.local_ranks(tiny(), plan_job(tiny())) == here
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert memory_check.local_ranks(tiny(), plan_job(tiny())) == ()


def test_a_run_says_it_beside_its_plan_and_not_in_it(tmp_path: Path) -> None:
    with started(tmp_path / "run", steps=1) as process:
        assert process.wait(300) == 0
    said = tmp_path.joinpath("run.log").read_text()
    assert re.search(r"^fits: 12\d\.\d MB of [\d.]+ GB free on this machine", said, re.MULTILINE)
    assert "fits:" not in (tmp_path / "run/plan.txt").read_text()
    assert status(tmp_path / "run")["status"] == "done"


def test_a_plan_for_smaller_devices_is_refused_with_what_makes_it_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lm = ("recipe=lm_single", "data=random_tokens", "data.seq_len=64", "steps=[train]", "train.steps=1")
    total = max(m.total for m in plan_job(compose(list(lm)).job).estimate.memory)
    room = round(0.8 * total / 2**30, 6)
    assert main([*lm, f"cluster.memory_gb={room}", f"run_dir={tmp_path}/run"]) == 2
    assert re.search(
        rf"cluster\.memory_gb = {room:g}\d*: does not fit: rank 0 needs [\d.]+ MB of [\d.]+ MB; "
        r"launch\.check_memory=false starts it anyway\n(.*\n)*? +try: .*parallel\.recompute=auto\n",
        capsys.readouterr().err,
    )
    assert list(tmp_path.iterdir()) == []
    plan = plan_job(compose([*lm, f"cluster.memory_gb={room}", "parallel.recompute=auto"]).job)
    assert max(m.total for m in plan.estimate.memory) <= room * 2**30


def test_the_memory_of_a_device_is_what_auto_fits_if_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, mb=0, devices=(2**33,))
    monkeypatch.setattr("launcher.runtime.device.accelerator", lambda: "cuda")
    monkeypatch.setattr("launcher.runtime.device.count", lambda kind: 1)
    asked = tiny("parallel.recompute=auto")
    assert memory_check.with_device_memory(asked).cluster.memory_gb == 8
    for other in ("launch.device=cpu", "cluster.memory_gb=3"):
        same = tiny("parallel.recompute=auto", other)
        assert memory_check.with_device_memory(same) == same
    assert memory_check.with_device_memory(tiny()) == tiny()
