"""Writes Kubernetes manifests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import REQUEUE, Problem
from launcher.job.schema.job import Job
from launcher.job.schema.launch import Kubernetes
from launcher.plan.plan import Plan
from launcher.run import frozen_request
from launcher.run.resolved_request import run_location
from launcher.run.submit_to_cluster import JOB, SKY

CONTAINER = "pytorch"
"""The name that a PyTorchJob expects of its container."""
PORT_NAME = "pytorchjob-port"
LONGEST_NAME = 40  # characters; the names of pods are longer, and Kubernetes allows 63

Values = dict[str, Any]


def name(run: str, folder: str) -> str:
    """Returns the name of the job of ``run`` in its ``folder``, valid as the name of a service.

    >>> name("lm_8b.h100", "0001"), name("8b", "big")
    ('lm-8b-h100-0001', 'run-8b-big')
    """
    text = re.sub(r"[^a-z0-9]+", "-", f"{run}-{folder}".lower()).strip("-")
    text = text if text[0].isalpha() else f"run-{text}"
    if len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def metadata(settings: Kubernetes, called: str) -> Values:
    return _set(name=called, namespace=settings.namespace, labels=dict(settings.labels))


def pod_spec(settings: Kubernetes, script: str, gpus: int, port: int | None = None) -> Values:
    """Returns the pod of a node that requests ``gpus``; ``port``: the named port that a PyTorchJob needs."""
    mounts = [{"name": "shared", "mountPath": settings.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    container = _set(
        name=CONTAINER,
        image=settings.image,
        command=["/bin/bash", "-c", script],
        env=[{"name": key, "value": value} for key, value in settings.env.items()],
        envFrom=[{"secretRef": {"name": settings.env_from}}] if settings.env_from else [],
        ports=[] if port is None else [{"name": PORT_NAME, "containerPort": port}],
        resources=_resources(settings, gpus),
        volumeMounts=mounts,
    )
    # NCCL's ranks on a node use shared memory, of which a container has 64 MB by default
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return _set(
        terminationGracePeriodSeconds=settings.signal_s,
        nodeSelector=dict(settings.node_selector),
        containers=[container],
        volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": settings.claim}}, shm],
    )


def _resources(settings: Kubernetes, gpus: int) -> Values:
    """Returns a pod's resources: exactly the GPUs and memory that it requests, and any idle CPU cores."""
    memory = {} if settings.memory_gb is None else {"memory": f"{settings.memory_gb}Gi"}
    cpus = {} if settings.cpus is None else {"cpu": str(settings.cpus)}
    limits = memory | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return _set(requests=cpus | memory, limits=limits)


def _set(**values: Any) -> Values:
    """Returns the values that are not empty."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}


KILLED = 128 + 15
"""A shell's exit code for a process that SIGTERM has ended."""


@dataclass(frozen=True)
class NodeVariables:
    """Bash expressions for the index of a node and for the rendezvous, as the cluster provides them."""

    index: str
    address: str
    port: str


@dataclass(frozen=True)
class NodeCommand:
    """The command of every rank, ``each`` of them per node, in ``folder``; ``setup``: lines to run first."""

    words: Sequence[str]
    folder: str
    nodes: int
    each: int
    setup: Sequence[str] = ()


def script(command: NodeCommand, at: NodeVariables, stopped: int = REQUEUE, ends: Sequence[str] = ()) -> str:
    """Returns the script that each node runs.

    ``stopped``: its exit code if SIGTERM arrives before it starts ranks. ``ends``: lines that may change
    ``$code``, with which the script exits.
    """
    return "\n".join([*_head(command, at, stopped), *_ranks(command), *_wait(), *ends, 'exit "$code"']) + "\n"


def _head(command: NodeCommand, at: NodeVariables, stopped: int) -> Iterator[str]:
    yield "set -u"
    yield f"trap 'exit {stopped}' TERM  # no rank has started, so nothing is lost"
    yield f"cd {quote(command.folder)} || exit 1"
    yield from command.setup
    variables: Mapping[str, object] = {
        "MASTER_ADDR": at.address,
        "MASTER_PORT": at.port,
        "WORLD_SIZE": command.nodes * command.each,
        "LOCAL_WORLD_SIZE": command.each,
    }
    yield f"node={at.index}"
    yield from (f"export {name}={value}" for name, value in variables.items() if value != f"${name}")


def _ranks(command: NodeCommand) -> Iterator[str]:
    words = " ".join(map(quote, command.words))
    yield ""
    yield "ranks=()"
    yield f"for ((i = 0; i < {command.each}; i++)); do"
    yield f"    RANK=$((node * {command.each} + i)) LOCAL_RANK=$i {words} &"
    yield '    ranks+=("$!")'
    yield "done"
    yield "stopping="
    yield """trap 'stopping=1; kill -TERM "${ranks[@]}" 2>/dev/null' TERM"""


def _wait() -> Iterator[str]:
    yield ""
    yield f"# A rank that gets the signal saves and exits with {REQUEUE};"
    yield f"# one that is still starting is ended by the signal itself ({KILLED})."
    yield "code=0"
    yield 'for rank in "${ranks[@]}"; do'
    yield '    wait "$rank"'
    yield "    ended=$?"
    yield '    while [ -n "$stopping" ]; do  # the signal has interrupted wait, not the rank'
    yield "        stopping="
    yield '        wait "$rank"'
    yield "        ended=$?"
    yield "    done"
    yield f'    [ "$ended" -ge 0 ] || ended={REQUEUE}  # bash lost the exit code: start again'
    yield '    case "$ended" in'
    yield "        0) ;;"
    yield f'        {REQUEUE} | {KILLED}) [ "$code" -ne 0 ] || code={REQUEUE} ;;'
    yield f'        *) [ "$code" -ne 0 ] && [ "$code" -ne {REQUEUE} ] || code=$ended ;;'
    yield "    esac"
    yield "done"


RANKS_JOB = "ranks"  # the only job of a JobSet
AGAIN = 138
"""The exit code of a pod that a PyTorchJob must restart: at least 128, and not used otherwise."""
LATER_S = 10  # seconds until rank 0 has ended too: a restarted pod must not join the old run


@dataclass(frozen=True)
class ClusterJob:
    """A run as a Kubernetes job.

    ``name``: a valid name in Kubernetes; ``restarts``: the most restarts after failures; ``gpus``: per node.
    """

    name: str
    settings: Kubernetes
    command: NodeCommand
    port: int
    gpus: int
    restarts: int


def jobset(job: ClusterJob) -> Values:
    """Returns a JobSet in which all pods form one indexed Job.

    If a pod is stopped or lost, the Job fails with the reason PodFailurePolicy, and the JobSet recreates all
    pods. These restarts do not count towards ``maxRestarts``.
    """
    first = f"{job.name}-{RANKS_JOB}-0-0.{job.name}"
    at = NodeVariables("$JOB_COMPLETION_INDEX", first, str(job.port))
    pod = {"restartPolicy": "Never"} | pod_spec(job.settings, script(job.command, at), job.gpus)
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
        "replicatedJobs": [{"name": RANKS_JOB, "replicas": 1, "template": {"spec": indexed}}],
    }
    return _document("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec)


def pytorchjob(job: ClusterJob) -> Values:
    """Returns a PyTorchJob: the Kubeflow operator sets RANK, the pod's index, and the master's address."""
    at = NodeVariables("$RANK", "$MASTER_ADDR", "$MASTER_PORT")
    ends = (
        "# A PyTorchJob restarts a pod only if its exit code is 128 or more.",
        f'if [ "$code" -eq {REQUEUE} ]; then',
        f'    [ "$node" -eq 0 ] || sleep {LATER_S}  # restarted ranks must not find the old rank 0',
        f"    code={AGAIN}",
        'elif [ "$code" -ge 128 ]; then',
        "    code=1",
        "fi",
    )
    pod = pod_spec(job.settings, script(job.command, at, AGAIN, ends), job.gpus, job.port)
    counts = {"Master": 1, "Worker": job.command.nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}
        for role, count in counts.items()
        if count
    }
    return _document("kubeflow.org/v1", "PyTorchJob", job, {"pytorchReplicaSpecs": specs})


def skypilot(job: ClusterJob) -> Values:
    """Returns a task of SkyPilot, which restarts a job when nodes are lost, and on certain exit codes."""
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
        "metadata": metadata(job.settings, job.name),
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
    """Returns ``document`` as YAML; ``about``: comments above it."""
    lines = [f"# {line}" for line in about]
    return "\n".join([*lines, yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1 << 16)])


KEY = "launch.k8s"
PORT = 29500
"""Pods have their own addresses, so no other job can occupy the port."""

KINDS: dict[str, tuple[str, Callable[[ClusterJob], Values], str]] = {
    "jobset": (JOB, jobset, "kubectl apply -f"),
    "pytorchjob": (JOB, pytorchjob, "kubectl apply -f"),
    "skypilot": (SKY, skypilot, "sky jobs launch"),
}
"""The file of each kind, its content, and the command that submits it."""


def problems(job: Job, outer: int | None) -> list[Problem]:
    """Returns problems that are known before the plan.

    ``outer``: the ranks that torchrun or srun has started.
    """
    settings = job.launch.k8s
    if settings is None:
        return []
    problems = frozen_request.problems(job, KEY, "Kubernetes", outer)
    return problems if outer is not None else [*problems, *_unshared(job, settings), *_unlike(job, settings)]


def _unshared(job: Job, settings: Kubernetes) -> list[Problem]:
    """Returns problems of folders that the pods cannot see."""
    key, run = run_location(job)
    problems = []
    if not run.absolute().is_relative_to(settings.mount):
        text = f"{run}: the pods see only {settings.mount} ({KEY}.mount), and the run folder is outside it"
        problems.append(Problem(key, text))
    if not _workdir(settings).is_relative_to(settings.mount):
        subject = (
            "this folder" if settings.workdir is not None else f"the current folder {_workdir(settings)}"
        )
        text = (
            f"{settings.workdir or 'null'}: the pods see only {settings.mount} ({KEY}.mount), and {subject}"
        )
        problems.append(Problem(f"{KEY}.workdir", f"{text} is outside it", f"{KEY}.workdir={settings.mount}"))
    return problems


def _unlike(job: Job, settings: Kubernetes) -> list[Problem]:
    """Returns problems of settings that this kind of job does not support."""
    problems = []
    if settings.kind == "skypilot" and settings.gpu is None and _gpus(job, settings, 1):
        text = "null: SkyPilot requests GPUs by name; give one, such as H100"
        problems.append(Problem(f"{KEY}.gpu", text))
    if settings.kind == "skypilot" and settings.env_from is not None:
        text = f"{settings.env_from}: a SkyPilot task cannot use Kubernetes Secrets"
        problems.append(Problem(f"{KEY}.env_from", f"{text}; use sky jobs launch --secret NAME"))
    if settings.kind == "pytorchjob" and job.launch.max_restarts:
        again = "a PyTorchJob restarts a run that was stopped, not one that failed"
        text = f"{job.launch.max_restarts}: {again}; a JobSet restarts both"
        problems.append(Problem("launch.max_restarts", text))
    return problems


def _workdir(settings: Kubernetes) -> Path:
    return Path.cwd() if settings.workdir is None else Path(settings.workdir)


def _gpus(job: Job, settings: Kubernetes, each: int) -> int:
    """Returns the GPUs of a node with ``each`` ranks."""
    if settings.gpus_per_node is not None:
        return settings.gpus_per_node
    return 0 if job.launch.device == "cpu" else each


def write(job: Job, plan: Plan, run: Path) -> str:
    """Writes the request and the job into the run folder. Returns the command that submits the job."""
    settings = job.launch.k8s
    assert settings is not None
    each = frozen_request.write(job, plan, run)
    file, document, command = KINDS[settings.kind]
    called = cluster_job(job, settings, each, run.absolute())
    submitted = quote(str(run.absolute() / file))
    about = (f"Written by launcher for this run folder. To submit: {command} {submitted}",)
    for other in {JOB, SKY} - {file}:  # an earlier start may have written another kind
        (run / other).unlink(missing_ok=True)
    write_text(run / file, as_yaml(document(called), about))
    return f"{command} {quote(str(run / file))}"


def cluster_job(job: Job, settings: Kubernetes, each: int, run: Path) -> ClusterJob:
    """Returns the values of the job; ``each``: ranks per node; ``run``: an absolute path."""
    words = (settings.python, "-m", "launcher", *frozen_request.words(run))
    command = NodeCommand(words, str(_workdir(settings)), job.launch.nnodes, each, settings.setup)
    return ClusterJob(
        name=name(job.name, run.name),
        settings=settings,
        command=command,
        port=job.launch.port or PORT,
        gpus=_gpus(job, settings, each),
        restarts=job.launch.max_restarts,
    )
