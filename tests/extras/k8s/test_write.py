"""``launch=k8s``: what is refused, what is written, and that pods which run it resume where they stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.__main__ import main
from tests.extras.k8s.test_manifests import scripts
from tests.ports import free_port
from tests.run.launching import ROOT, TINY, checkpoints, complete_steps, status, steps, until


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pods could see, too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(place: Path, *more: str, n: int = 20) -> list[str]:
    k8s = ["image=reg/us/train:1", "claim=shared", f"mount={place}", f"python={sys.executable}"]
    nodes = ["launch=k8s", "launch.nnodes=2", "launch.nproc=1", "launch.device=cpu"]
    asked = [*nodes, *(f"launch.k8s.{word}" for word in k8s), "parallel.pipeline.stages=1"]
    return [*TINY, *asked, f"train.steps={n}", "run_dir=job", *more]


@pytest.mark.parametrize(
    ("kind", "file", "typed"),
    [
        ("jobset", "job.yaml", "kubectl apply -f job/job.yaml"),
        ("pytorchjob", "job.yaml", "kubectl apply -f job/job.yaml"),
        ("skypilot", "sky.yaml", "sky jobs launch job/sky.yaml"),
    ],
)
def test_a_request_is_planned_and_its_manifest_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str, typed: str
) -> None:
    assert main(words(place, f"launch.k8s.kind={kind}")) == 0
    *plan, last = capsys.readouterr().out.splitlines()
    assert (plan[0], last) == ("plan of lm_tied_pp2_hsdp2", f"not submitted: {typed}")
    assert status(place / "job")["status"] == "written"
    assert {file, "plan.json", "request.yaml", "versions.json"} <= {p.name for p in (place / "job").iterdir()}
    first, second = (place / "job" / file).read_text().splitlines()[:2]
    command = typed.replace("job/", f"{place}/job/")
    assert first == f"# Written by launcher for this run folder. To submit: {command}"
    assert second == {
        "jobset": "apiVersion: jobset.x-k8s.io/v1alpha2",
        "pytorchjob": "apiVersion: kubeflow.org/v1",
        "skypilot": "name: lm-tied-pp2-hsdp2-job",
    }.get(kind)


def test_the_file_of_another_kind_is_removed(place: Path) -> None:
    assert main(words(place, "launch.k8s.kind=skypilot")) == 0
    assert main(words(place)) == 0
    assert [p.name for p in (place / "job").glob("*.yaml")].count("sky.yaml") == 0
    assert (place / "job/job.yaml").is_file()


REFUSED = {
    "both": (
        "launch.slurm={submit: false}",
        "{k8s}: launch.k8s and launch.slurm are both set; leave one out\n"
        "    set in: conf/launch/k8s.yaml:5:1\n"
        "          | k8s:\n",
    ),
    "mode": (
        "launch.mode=spawn",
        "launch.mode = spawn: in a job of Kubernetes the ranks are started by its pods\n    set by: {typed}\n",
    ),
    "a secret": (
        "launch.k8s.env={HF_TOKEN: ***",
        "{k8s}.env.HF_TOKEN: is a secret, and the request is written into the run folder; launch.k8s.env_from names a "
        "Secret that contains it\n    set by: {typed}\n",
    ),
    "run folder": (
        "run_dir=/var/tmp/job",
        "run_dir = /var/tmp/job: the pods see only {place} ({k8s}.mount), and the run folder is outside it\n"
        "    set by: {typed}\n",
    ),
    "folder": (
        "launch.k8s.workdir=/me",
        "{k8s}.workdir = /me: the pods see only {place} ({k8s}.mount), and this folder is outside it\n"
        "    set by: {typed}\n",
    ),
    "GPUs without a name": (
        "launch.k8s={kind: skypilot, gpus_per_node: 8}",
        "{k8s}.gpu = null: SkyPilot requests GPUs by name; give one, such as H100\n"
        "    set in: conf/launch/k8s.yaml:14:3\n"
        "          |   gpu: null            # name of the GPUs, for kind=skypilot: H100\n",
    ),
    "a Secret for SkyPilot": (
        "launch.k8s={kind: skypilot, env_from: keys}",
        "{k8s}.env_from = keys: a SkyPilot task cannot use Kubernetes Secrets; use sky jobs launch "
        "--secret NAME\n    set by: {typed}\n",
    ),
}


@pytest.mark.parametrize(("typed", "said"), REFUSED.values(), ids=REFUSED)
def test_requests_that_pods_cannot_run_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    assert main(words(place, typed.replace("***", "hunter22}"))) == 2
    for name, value in {"k8s": "launch.k8s", "typed": f"{typed} (command line)", "place": str(place)}.items():
        said = said.replace(f"{{{name}}}", value)
    assert capsys.readouterr().err == f"error: 1 problem in this request; nothing was started\n\n  {said}"
    assert list(place.iterdir()) == []


def test_restarts_that_a_pytorchjob_does_not_know(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(place, "launch.k8s.kind=pytorchjob", "launch.max_restarts=2")) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  launch.max_restarts = 2: a PyTorchJob restarts a run that was stopped, not one that failed; a JobSet "
        "restarts both\n    set by: launch.max_restarts=2 (command line)\n"
    )


def test_a_current_folder_that_pods_would_not_see(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "data").mkdir()
    more = [f"launch.k8s.mount={place}/data", f"run_dir={place}/data/job"]
    assert main(words(place, *more)) == 2
    here = f"{place}/data (launch.k8s.mount), and the current folder {place} is outside it"
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  launch.k8s.workdir = null: the pods see only {here}\n"
        "    set in: conf/launch/k8s.yaml:10:3\n"
        "          |   workdir: null        # folder where ranks start; null: the current one, which must be in mount\n"
        f"    try:    launch.k8s.workdir={place}/data\n"
    )


def test_a_request_without_an_image_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "launch=k8s", "launch.k8s.claim=x", "launch.k8s.mount=/x"]) == 2
    assert "launch.k8s.image: needs a value: image of the pods, which contains launcher" in capsys.readouterr().err


def test_a_rank_of_torchrun_cannot_write_a_manifest(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(words(place)) == 2
    assert "launch.k8s: this process is already a rank of torchrun or srun" in capsys.readouterr().err


def test_pods_that_are_told_to_stop_save_and_go_on(place: Path) -> None:
    """Two pods run the script of the PyTorchJob with the variables that its operator would set; one gets the signal."""
    assert main(words(place, "launch.k8s.kind=pytorchjob", "launch.threads=1")) == 0
    job = place / "job"
    document = yaml.safe_load((job / "job.yaml").read_text())

    def started() -> list[subprocess.Popen[str]]:
        said = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        return [
            subprocess.Popen(["bash", "-c", script], env=os.environ | said | {"RANK": str(node)}, text=True)
            for node, script in enumerate(scripts("pytorchjob", document))
        ]

    pods = started()
    try:
        until(lambda: (job / "metrics.jsonl").exists() and max(complete_steps(job), default=0) >= 2, pods[0])
        pods[1].send_signal(signal.SIGTERM)
        assert [pod.wait(300) for pod in pods] == [138, 138]
        assert status(job)["status"] == "preempted"
        assert len(checkpoints(job)) == 1
        pods = started()
        assert [pod.wait(300) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            pod.terminate()
    assert steps(job) == list(range(1, 21))
    assert status(job)["status"] == "done"
