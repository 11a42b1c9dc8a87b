"""A JobSet, a PyTorchJob and a task of SkyPilot as plain values, and as YAML."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from launcher.errors import REQUEUE
from launcher.job.schema.kubernetes import Kubernetes
from launcher.run.cluster_jobs.k8s import pods
from launcher.run.cluster_jobs.k8s.pods import CONTAINER, Values
from launcher.run.cluster_jobs.k8s.start_script import NodeCommand, NodeVariables, script

JOB = "ranks"  # the one job of a JobSet
AGAIN = 138
"""The exit code of a pod that a PyTorchJob must restart: at least 128, and not used otherwise."""
LATER_S = 10  # until rank 0 has ended too: a restarted pod must not join the old run


@dataclass(frozen=True)
class ClusterJob:
    """``name``: a valid name in Kubernetes; ``restarts``: how many after failures; ``gpus``: per node."""

    name: str
    settings: Kubernetes
    command: NodeCommand
    port: int
    gpus: int
    restarts: int


def jobset(job: ClusterJob) -> Values:
    """All pods form one indexed Job: if one is told to stop or is lost, all are recreated.

    The Job then fails with a separate reason, and such restarts are not counted.
    """
    first = f"{job.name}-{JOB}-0-0.{job.name}"
    at = NodeVariables("$JOB_COMPLETION_INDEX", first, str(job.port))
    pod = {"restartPolicy": "Never"} | pods.pod(job.settings, script(job.command, at), job.gpus)
    saved = {"containerName": CONTAINER, "operator": "In", "values": [REQUEUE]}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [{"action": "FailJob", "onExitCodes": saved}, {"action": "FailJob", "onPodConditions": evicted}]
    indexed = {
        "completionMode": "Indexed",
        "completions": job.command.nodes,
        "parallelism": job.command.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    again = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [again]},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": indexed}}],
    }
    return _document("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)


def pytorchjob(job: ClusterJob) -> Values:
    """The operator sets RANK to the index of the pod out of WORLD_SIZE, and the address of the master."""
    at = NodeVariables("$RANK", "$MASTER_ADDR", "$MASTER_PORT")
    ends = (
        "# A PyTorchJob starts a pod again that ends with 128 or more, and no other.",
        f'if [ "$code" -eq {REQUEUE} ]; then',
        f'    [ "$node" -eq 0 ] || sleep {LATER_S}  # the next start must not meet the rank 0 of this one',
        f"    code={AGAIN}",
        'elif [ "$code" -ge 128 ]; then',
        "    code=1",
        "fi",
    )
    pod = pods.pod(job.settings, script(job.command, at, AGAIN, ends), job.gpus, job.port)
    counts = {"Master": 1, "Worker": job.command.nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}
        for role, count in counts.items()
        if count
    }
    return _document("kubeflow.org/v1", "PyTorchJob", job, {"pytorchReplicaSpecs": specs})


def skypilot(job: ClusterJob) -> Values:
    """SkyPilot restarts a managed job when nodes are lost, and on certain exit codes."""
    settings = job.settings
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    at = NodeVariables("$SKYPILOT_NODE_RANK", first, str(job.port))
    recovery: Values = {"recover_on_exit_codes": [REQUEUE]}
    if job.restarts:
        recovery["max_restarts_on_errors"] = job.restarts
    resources: Values = {"infra": "k8s", "image_id": f"docker:{settings.image}"}
    if job.gpus:
        resources["accelerators"] = f"{settings.gpu}:{job.gpus}"
    if settings.cpus is not None:
        resources["cpus"] = f"{settings.cpus}+"
    if settings.memory_gb is not None:
        resources["memory"] = f"{settings.memory_gb}+"
    if settings.labels:
        resources["labels"] = dict(settings.labels)
    return {
        "name": job.name,
        "num_nodes": job.command.nodes,
        "resources": resources | {"job_recovery": recovery},
        **({"envs": dict(settings.env)} if settings.env else {}),
        "volumes": {settings.mount: settings.claim},
        "run": script(job.command, at),
    }


def _document(version: str, kind: str, job: ClusterJob, spec: Values) -> Values:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": pods.metadata(job.settings, job.name),
        "spec": spec,
    }


class _Dumper(yaml.SafeDumper):
    """Dumps scripts as blocks of lines, and repeats values instead of using references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(document: Values, about: tuple[str, ...]) -> str:
    """``document`` as YAML; ``about``: comments above it."""
    lines = [f"# {line}" for line in about]
    return "\n".join([*lines, yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1 << 16)])
