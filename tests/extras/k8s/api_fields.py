"""The fields of the interfaces that we write for, as they are published, as far as we need them.

JobSet jobset.x-k8s.io/v1alpha2, PyTorchJob kubeflow.org/v1, Job batch/v1 and Pod v1, and SkyPilot's task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXTS, INTS = {"*": str}, [int]
META = {"name": str, "namespace": str, "labels": TEXTS}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "env": [{"name": str, "value": str}],
    "envFrom": [{"secretRef": {"name": str}}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"requests": TEXTS, "limits": TEXTS},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": {"Memory"}}}
POD = {
    "restartPolicy": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": int,
    "nodeSelector": TEXTS,
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
FAILURE_RULE = {
    "action": {"FailJob", "Ignore", "Count", "FailIndex"},
    "onExitCodes": {"containerName": str, "operator": {"In", "NotIn"}, "values": INTS},
    "onPodConditions": [{"type": str, "status": {"True", "False", "Unknown"}}],
}
JOB = {
    "completionMode": {"Indexed", "NonIndexed"},
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [FAILURE_RULE]},
    "template": {"spec": POD},
}
RESTART_RULE = {
    "name": str,
    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "onJobFailureReasons": [
        {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
    ],
}
JOBSET = {
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "failurePolicy": {"maxRestarts": int, "rules": [RESTART_RULE]},
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {"spec": POD},
}
PYTORCHJOB = {"pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS}}
SKYPILOT = {
    "name": str,
    "num_nodes": int,
    "resources": {
        "infra": str,
        "image_id": str,
        "accelerators": str,
        "cpus": str,
        "memory": str,
        "labels": TEXTS,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": INTS},
    },
    "envs": TEXTS,
    "volumes": TEXTS,
    "run": str,
}
KINDS: dict[str, Any] = {
    "jobset": {"apiVersion": {"jobset.x-k8s.io/v1alpha2"}, "kind": {"JobSet"}, "metadata": META, "spec": JOBSET},
    "pytorchjob": {"apiVersion": {"kubeflow.org/v1"}, "kind": {"PyTorchJob"}, "metadata": META, "spec": PYTORCHJOB},
    "skypilot": SKYPILOT,
}


def unknown(value: Any, known: Any, at: str = "") -> Iterator[str]:
    """Yield where ``value`` differs from ``known``: a type, a set of words, a list of one kind, or keys."""
    if isinstance(known, type):
        if type(value) is not known:
            yield f"{at}: {value!r} is no {known.__name__}"
    elif isinstance(known, set):
        if value not in known:
            yield f"{at}: {value!r} is none of {sorted(known)}"
    elif isinstance(known, list):
        for i, one in enumerate(value):
            yield from unknown(one, known[0], f"{at}[{i}]")
    else:
        for key, one in value.items():
            kind = known.get(key, known.get("*"))
            yield from [f"{at}.{key}: there is no such field"] if kind is None else unknown(one, kind, f"{at}.{key}")
