"""Two nodes on this machine: two network namespaces and a cable between them. Needs root and ``ip``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.run.launching import ROOT

INTERFACE = "eth0"
PREFIX = "launchernodes"


def missing() -> str:
    """Why there can be no nodes here, in words; "" where there can."""
    if "NODES_TEST" not in os.environ:
        return "make test-nodes makes two network namespaces"
    if os.geteuid():
        return "network namespaces are made by root"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2) on this machine"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"this machine makes no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Node:
    """One of the two. Its host name stands for no address unless ``hosts`` says so."""

    index: int
    namespace: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.index + 1}"

    @property
    def address6(self) -> str:
        return f"fd77::{self.index + 1}"

    def ip(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def cable(self, plugged: bool) -> None:
        self.ip("link", "set", INTERFACE, "up" if plugged else "down")

    def start(
        self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None, before: str = ""
    ) -> subprocess.Popen[str]:
        """Start a process there; ``before`` are lines of bash, in a mount namespace of the process's own."""
        inside = f'hostname {self.name}; {before}\nexec "$@"'
        outer = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "bash", "-ec", inside, "_"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*outer, *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "NODE": str(self.index)} | dict(env or {}),
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kill all that is at work there."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, gone after the block with all that is at work there."""
    _sweep()
    nodes = (Node(0, f"{PREFIX}-{os.getpid()}-0"), Node(1, f"{PREFIX}-{os.getpid()}-1"))
    try:
        for node in nodes:
            ip("netns", "add", node.namespace)
            node.ip("link", "set", "lo", "up")
        plug(nodes)
        yield nodes
    finally:
        for node in nodes:
            node.end()
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)


def plug(nodes: tuple[Node, Node]) -> None:
    """Put a cable between them: made in the namespaces, so nothing of it is ever seen outside."""
    near, far = nodes
    near.ip("link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", far.namespace)
    for node in nodes:
        node.ip("addr", "add", f"{node.address}/24", "dev", INTERFACE)
        node.ip("addr", "add", f"{node.address6}/64", "dev", INTERFACE, "nodad")
        node.ip("link", "set", INTERFACE, "up")


def _sweep() -> None:
    """Take away what a run that was killed has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
