"""The JobSet, the PyTorchJob and the SkyPilot task that are written.

``python -m tests.extras.k8s.test_manifests`` writes the golden files again.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.extras.k8s import k8s as pods
from launcher.extras.k8s.k8s import KINDS, as_yaml, cluster_job
from launcher.job.compose import compose
from tests.extras.k8s.api_fields import KINDS as KNOWN
from tests.extras.k8s.api_fields import unknown

GOLDEN = Path(__file__).parents[2] / "golden/k8s"
AGAIN = "if it should be so: python -m tests.extras.k8s.test_manifests"
NEEDED = ("image=registry.example/us/train:1", "claim=shared", "mount=/shared", "workdir=/shared/me")
ALL = (
    "namespace=us", "cpus=96", "memory_gb=1024", "signal_s=600", "python=/shared/me/.venv/bin/python",
    "setup=['ulimit -l unlimited']", "env={NCCL_SOCKET_IFNAME: eth0, NCCL_IB_TC: 106}",
    "labels={kueue.x-k8s.io/queue-name: us}", "node_selector={gpu: h100}",
)  # fmt: skip
ASKED: dict[str, tuple[str, ...]] = {
    "jobset": (*ALL, "env_from=keys"),
    "pytorchjob": (*ALL, "env_from=keys"),
    "skypilot": (*ALL, "gpu=H100"),
}


def values(kind: str, *k8s: str, each: int = 8, more: tuple[str, ...] = ("launch.nnodes=8",)) -> dict[str, Any]:
    """Return the manifest of ``kind`` as plain values."""
    asked = [f"launch.k8s.{word}" for word in (*NEEDED, f"kind={kind}", *k8s)]
    job = compose(["recipe=lm_single", "name=lm_8b", "launch=k8s", *more, *asked]).job
    assert job.launch.k8s is not None
    return KINDS[kind][1](cluster_job(job, job.launch.k8s, each, Path("/shared/me/runs/lm_8b/0001")))


def full_manifest(kind: str) -> dict[str, Any]:
    """Return the manifest with all optional settings."""
    restarts = () if kind == "pytorchjob" else ("launch.max_restarts=3",)
    return values(kind, *ASKED[kind], more=("launch.nnodes=8", *restarts))


def written(kind: str) -> str:
    return as_yaml(full_manifest(kind), ("Written by launcher.",))


def scripts(kind: str, document: dict[str, Any]) -> list[str]:
    """Return the scripts that bash runs."""
    if kind == "skypilot":
        return [document["run"]]
    spec = document["spec"]
    found = spec["replicatedJobs"][0]["template"]["spec"]["template"] if kind == "jobset" else None
    templates = [found] if found else [role["template"] for role in spec["pytorchReplicaSpecs"].values()]
    return [template["spec"]["containers"][0]["command"][-1] for template in templates]


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_its_golden_file(kind: str) -> None:
    assert written(kind) == (GOLDEN / f"{kind}.yaml").read_text(), AGAIN


@pytest.mark.parametrize("kind", KINDS)
def test_the_yaml_of_a_manifest_parses_to_its_values(kind: str) -> None:
    assert yaml.safe_load(written(kind)) == full_manifest(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_of_it", [False, True], ids=["least", "all"])
def test_every_field_is_one_that_the_interface_has(kind: str, all_of_it: bool) -> None:
    document = full_manifest(kind) if all_of_it else values(kind, "gpu=H100")
    assert list(unknown(document, KNOWN[kind])) == []


def test_unknown_fields_and_wrong_types_are_detected() -> None:
    document = values("jobset")
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["parallel"] = 1
    document["spec"]["network"]["subdomain"] = 5
    assert list(unknown(document, KNOWN["jobset"])) == [
        ".spec.network.subdomain: 5 is no str",
        ".spec.replicatedJobs[0].template.spec.parallel: there is no such field",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_bash_reads_the_script(kind: str, tmp_path: Path) -> None:
    for script in scripts(kind, values(kind, *ASKED[kind])):
        (tmp_path / "script").write_text(script)
        done = subprocess.run(["bash", "-n", tmp_path / "script"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_kubernetes_puts_nothing_in_the_place_of_variables(kind: str) -> None:
    """Kubernetes replaces $(NAME) in a command by a variable of the container, and $$ by $."""
    for script in scripts(kind, values(kind, *ASKED[kind])):
        assert "$$" not in script
        assert "$(" not in script.replace("$((node * 8 + i))", "")


def test_ranks_on_the_cpu_ask_for_no_gpus() -> None:
    document = values("jobset", more=("launch.device=cpu",), each=2)
    [container] = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    assert "accelerators" not in values("skypilot", "gpus_per_node=0")["resources"]


def test_one_node_is_a_master_alone() -> None:
    assert list(values("pytorchjob", more=())["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_the_rendezvous_uses_the_requested_port() -> None:
    [script] = scripts("jobset", values("jobset", more=("launch.port=4000",)))
    assert "export MASTER_PORT=4000\n" in script


@pytest.mark.parametrize(
    ("run", "folder", "name"),
    [
        ("lm_8b.h100", "0001", "lm-8b-h100-0001"),
        ("8b", "mine", "run-8b-mine"),
        ("a" * 36, "001", "a" * 36 + "-001"),
        ("a" * 36, "0001", "a" * 31 + "-c789f7ac"),
    ],
)
def test_names_are_valid_and_short_service_names(run: str, folder: str, name: str) -> None:
    assert pods.name(run, folder) == name
    assert len(name) <= 40


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in KINDS:
        (GOLDEN / f"{each}.yaml").write_text(written(each))
