"""The pod of a node as plain values, and names in Kubernetes."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from launcher.job.schema.kubernetes import Kubernetes

CONTAINER = "pytorch"
"""The name that a PyTorchJob expects."""
PORT_NAME = "pytorchjob-port"
LONGEST = 40  # of a name; pods append to it, and may have at most 63 letters

Values = dict[str, Any]


def name(run: str, folder: str) -> str:
    """The name of the job of ``run`` in its ``folder``, valid as the name of a service.

    >>> name("lm_8b.h100", "0001"), name("8b", "big")
    ('lm-8b-h100-0001', 'run-8b-big')
    """
    text = re.sub(r"[^a-z0-9]+", "-", f"{run}-{folder}".lower()).strip("-")
    text = text if text[0].isalpha() else f"run-{text}"
    if len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: LONGEST - 9].rstrip('-')}-{digest}"


def metadata(settings: Kubernetes, called: str) -> Values:
    return _set(name=called, namespace=settings.namespace, labels=dict(settings.labels))


def pod(settings: Kubernetes, script: str, gpus: int, port: int | None = None) -> Values:
    """The pod of a node with ``gpus``; ``port``: a named one, for a PyTorchJob."""
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
    """The pod gets exactly the GPUs and memory it requests; it may also use idle CPU cores."""
    memory = {} if settings.memory_gb is None else {"memory": f"{settings.memory_gb}Gi"}
    cpus = {} if settings.cpus is None else {"cpu": str(settings.cpus)}
    limits = memory | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return _set(requests=cpus | memory, limits=limits)


def _set(**values: Any) -> Values:
    """The values that are not empty."""
    return {key: value for key, value in values.items() if value not in (None, [], {})}
