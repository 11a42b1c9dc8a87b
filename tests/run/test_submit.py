"""``launch=slurm``: what is refused, what is written, and what the job does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.ports import free_port
from tests.run.launching import ROOT, TINY, checkpoints, complete_steps, run, shape, status, steps, until

SRUN = """#!/bin/bash
# The tasks of one step on two nodes, as srun starts them; it ends with the highest of their codes.
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)"
export SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
for i in 0 1; do
    SLURM_PROCID=$i SLURM_NODEID=$i "$@" &
    echo $! >> pids
done
code=0
for pid in $(cat pids); do
    wait "$pid"
    ended=$?
    [ $ended -gt $code ] && code=$ended
done
rm pids
exit $code
"""
COMMANDS = {
    "srun": SRUN,
    "scontrol": '#!/bin/bash\necho "$@" >> asked\n',
    "sinfo": "#!/bin/bash\nprintf 'debug\\ngpu\\n'\n",
    "sbatch": '#!/bin/bash\necho "$@" >> submitted\necho "77;here"\n',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with fake Slurm commands."""
    for name, text in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more: str, n: int = 20) -> list[str]:
    nodes = ["launch=slurm", "launch.nnodes=2", "launch.nproc=1", "launch.device=cpu"]
    return [*TINY, *nodes, "parallel.pipeline.stages=1", f"train.steps={n}", "run_dir=job", *more]


def test_a_request_is_planned_written_and_submitted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("launch.slurm.partition=gpu")) == 0
    *plan, last = capsys.readouterr().out.splitlines()
    assert plan[0] == "plan of lm_tied_pp2_hsdp2"
    assert last == "job 77 of Slurm, job/job.sbatch; its output: tail -F job/slurm-77.log"
    assert (place / "submitted").read_text() == f"--parsable {place}/job/job.sbatch\n"
    assert (status(place / "job")["status"], status(place / "job")["slurm"]) == ("submitted", "77")
    assert {"job.sbatch", "plan.json", "request.yaml"} <= {p.name for p in (place / "job").iterdir()}
    secret = (place / "job/.secret").read_text()
    assert stat.S_IMODE((place / "job/.secret").stat().st_mode) == 0o600
    others = [p for p in (place / "job").rglob("*") if p.is_file() and p.name != ".secret"]
    assert not [p for p in others if secret.encode() in p.read_bytes()]
    assert f"export LAUNCHER_SECRET_FILE={place}/job/.secret " in (place / "job/job.sbatch").read_text()


def test_with_submit_false_the_batch_file_is_only_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("launch.slurm.submit=false")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not submitted: sbatch job/job.sbatch"
    assert not (place / "submitted").exists()
    assert status(place / "job")["status"] == "written"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "launch.slurm.partition=gpus",
            "  launch.slurm.partition = gpus: this cluster has no such partition; partitions: debug, gpu\n"
            "    set by: launch.slurm.partition=gpus (command line)\n"
            "    try:    launch.slurm.partition=gpu\n",
        ),
        (
            "launch.slurm.time=5",
            "  launch.slurm.time = 5: the time limit is too short: Slurm may send the signal to save 360 s before it "
            "(launch.slurm.signal_s=300, and up to 60 s earlier), at the start of the job\n"
            "    set by: launch.slurm.time=5 (command line)\n",
        ),
        (
            "launch.mode=spawn",
            "  launch.mode = spawn: in a job of Slurm the ranks are started by srun\n"
            "    set by: launch.mode=spawn (command line)\n",
        ),
    ],
    ids=["partition", "time", "mode"],
)  # fmt: skip
def test_options_that_the_cluster_does_not_have_are_refused(
    typed: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(typed)) == 2
    assert capsys.readouterr().err == f"error: 1 problem in this request; nothing was started\n\n{said}"
    assert sorted(p.name for p in place.iterdir()) == ["bin"]


def test_without_sbatch_a_submission_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/nothing")
    assert main(words()) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  launch.slurm.submit = true: there is no sbatch on this machine; false writes the batch file and submits "
        "nothing\n"
        "    set in: conf/launch/slurm.yaml:17:3\n"
        "          |   submit: true         # false: write the batch file only\n"
        "    try:    launch.slurm.submit=false\n"
    )


def test_a_task_of_srun_cannot_submit_a_job(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(words()) == 2
    assert "launch.slurm: this process is already a rank of torchrun or srun" in capsys.readouterr().err


def test_slurm_that_refuses_the_job_is_told_in_its_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bin/sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    assert main(words()) == 1
    assert capsys.readouterr().err == "error: sbatch: sbatch: error: Invalid account\n"


def started(place: Path, restarts: int, port: str) -> subprocess.Popen[str]:
    """Start the batch file with the environment that Slurm gives it."""
    env = os.environ | {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "MASTER_PORT": port}
    with (place / f"{restarts}.log").open("w") as log:
        return subprocess.Popen(["bash", place / "job/job.sbatch"], env=env, stdout=log, stderr=log, text=True)


def test_told_to_stop_it_asks_to_be_requeued_and_goes_on(place: Path) -> None:
    assert main(words()) == 0
    job = place / "job"
    first = started(place, 0, str(free_port()))
    try:
        until(lambda: (job / "metrics.jsonl").exists() and max(complete_steps(job), default=0) >= 2, first)
    finally:
        for pid in (place / "pids").read_text().split():
            os.kill(int(pid), signal.SIGUSR2)  # as --signal does
    assert first.wait(300) == 75
    assert (place / "asked").read_text() == "requeue 77\n"
    [saved] = checkpoints(job)
    assert started(place, 1, str(free_port())).wait(120) == 0
    assert f"resuming from {saved}" in (place / "1.log").read_text()
    assert (place / "asked").read_text() == "requeue 77\n"
    assert steps(job) == list(range(1, 21))
    assert status(job)["status"] == "done"


MINE = "class Silent:\n    def on_start(self, run):\n        pass\n"


def test_code_that_has_changed_since_the_submission_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    (place / "my_callbacks.py").write_text(MINE)
    mine = ["callbacks=[{_target_: my_callbacks.Silent}]", "security.allow=[my_callbacks]"]
    assert main(words(*mine)) == 0
    (place / "my_callbacks.py").write_text(f"{MINE}# better\n")
    run(place / "job", *mine, *shape(pp=2), steps=2)
    before, now = (hashlib.sha256(text.encode()).hexdigest() for text in (MINE, f"{MINE}# better\n"))
    assert [v["modules"] for v in json.loads((place / "job/versions.json").read_text())] == [
        {"my_callbacks": before}, {"my_callbacks": now},
    ]  # fmt: skip
    changed = f"my_callbacks {before[:10]} -> {now[:10]}"
    assert f"the code of this run has changed since it was submitted: {changed}" in caplog.messages


def test_told_to_stop_before_it_hears_it_is_requeued_too(place: Path) -> None:
    (place / "bin/srun").write_text("#!/bin/bash\nkill -USR2 $$\n")
    assert main(words()) == 0
    assert started(place, 0, "1").wait(60) == 140
    assert (place / "asked").read_text() == "requeue 77\n"


def test_tokens_are_not_made_on_the_login_node(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "corpus.jsonl").write_text('{"text": "to be made into tokens, some of them"}\n' * 40)
    tokens = ["data=tokens", "data.path=words", "data.seq_len=8", "steps=[prepare,train]", "model.vocab_size=null"]
    prepare = [f"steps.prepare.{word}" for word in ("src=corpus.jsonl", "dst=words", "tokenizer=bytes")]
    left = [w for w in words() if not w.startswith(("data", "steps"))]
    assert main([*left, *tokens, *prepare]) == 2
    assert (
        "  launch.slurm: the plan is made here, and reads tokens that a step of the job would make; make them first\n"
        in (capsys.readouterr().err)
    )
    assert not (place / "words").exists()
