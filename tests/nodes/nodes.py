"""Two nodes on this machine: two network namespaces and a cable between them. They need root and ``ip``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.run.launching import ROOT

INTERFACE = "eth0"
TUN = "/dev/net/tun"
PREFIX = "launchernodes"
START_S = 240.0
"""The time for a run to start or to end: its ranks share the cores of one machine."""
_pairs = count()


def missing() -> str:
    """Why this machine cannot have nodes, in words; "" if it can."""
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
    """One of the two nodes. Its host name resolves to no address unless ``hosts`` says so."""

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

    def settle(self) -> None:
        """Give the interface its addresses."""
        self.ip("addr", "add", f"{self.address}/24", "dev", INTERFACE)
        self.ip("addr", "add", f"{self.address6}/64", "dev", INTERFACE, "nodad")
        self.ip("link", "set", INTERFACE, "up")

    def inside(self, before: str = "") -> tuple[str, ...]:
        """The words before a command that runs on this node.

        ``before``: lines of bash, in the command's own mount namespace; ``$NODE`` is the node's index.
        """
        script = f'NODE={self.index}; hostname {self.name}; {before}\nexec "$@"'
        entered = ("nsenter", f"--net=/run/netns/{self.namespace}")  # ip netns exec would hide /sys/fs/cgroup
        return (*entered, "unshare", "--uts", "--mount", "bash", "-ec", script, "_")

    def start(
        self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None, before: str = ""
    ) -> subprocess.Popen[str]:
        """Start a process on this node; ``before`` as in ``inside``."""
        with log.open("w") as out:
            process = subprocess.Popen(
                [*self.inside(before), *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kill all processes on this node."""
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
    """Two nodes, removed after the block with all their processes."""
    _sweep()
    tag = f"{PREFIX}-{os.getpid()}-{next(_pairs)}"
    nodes = (Node(0, f"{tag}-0"), Node(1, f"{tag}-1"))
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
    """Put a cable between them. It is made inside the namespaces, so it is never visible outside."""
    near, far = nodes
    near.ip("link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", far.namespace)
    for node in nodes:
        node.settle()


@contextmanager
def bad_line(nodes: tuple[Node, Node], delay_ms: float, loss: float) -> Iterator[None]:
    """In the block, replace the cable by a line that delays each packet and loses the share ``loss`` of them."""
    if not os.access(TUN, os.R_OK | os.W_OK):
        pytest.skip(f"a bad line needs {TUN}, which is not there")
    nodes[0].ip("link", "del", INTERFACE)
    words = [nodes[0].namespace, nodes[1].namespace, INTERFACE, str(delay_ms), str(loss)]
    script = str(Path(__file__).with_name("bad_line.py"))
    with subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            for node in nodes:
                node.settle()
            yield
        finally:
            process.kill()


def _sweep() -> None:
    """Remove namespaces that a killed run has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Nodes:
    """Two nodes, and runs over both."""

    def __init__(self, pair: tuple[Node, Node]) -> None:
        self.pair = pair

    def ranks(self, at: Path, *words: str, each: int = 1, **change: Any) -> list[Started]:
        """Run ``launcher WORDS`` on ``each`` ranks of both nodes, started as a pod starts them.

        ``change`` is passed to ``rank``.
        """
        port = free_port()
        return [self.rank(at, rank, port, *words, each=each, **change) for rank in range(2 * each)]

    def rank(
        self,
        at: Path,
        rank: int,
        port: int,
        *words: str,
        each: int = 1,
        host: str | None = None,
        env: Mapping[str, str] | None = None,
        before: str = "",
    ) -> Started:
        """Start one rank, with ``host`` as MASTER_ADDR; its output goes to a file beside the folder ``at``."""
        near, node = self.pair[0], self.pair[rank // each]
        place = {
            "RANK": rank, "WORLD_SIZE": 2 * each, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": host or near.address, "MASTER_PORT": port,
        }  # fmt: skip
        log = at.with_name(f"{at.name}.rank{rank}.log")
        every = {key: str(value) for key, value in place.items()} | dict(env or {})
        command = [sys.executable, "-m", "launcher", "launch.nnodes=2", f"launch.nproc={each}", "launch.device=cpu"]
        return Started(node.start([*command, *words, f"run_dir={at}"], log, every, before), log)

    def agents(self, at: Path, *words: str, each: int = 2, late_s: float = 0) -> list[Started]:
        """Run it with a torchrun agent on each node; the second node starts ``late_s`` later."""
        port = free_port()
        started = []
        for node in self.pair:
            outer = [
                "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node.index}", f"--nproc-per-node={each}",
                f"--master-addr={self.pair[0].address}", f"--master-port={port}", "-m", "launcher",
            ]  # fmt: skip
            inner = ["launch.nnodes=2", f"launch.nproc={each}", "launch.device=cpu", *words, f"run_dir={at}"]
            log = at.with_name(f"{at.name}.node{node.index}.log")
            wait = f"sleep {late_s}" if node.index else ""
            started.append(Started(node.start([sys.executable, *outer, *inner], log, before=wait), log))
        return started


@dataclass
class Started:
    """A process and the file that it writes to."""

    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    def error(self) -> str:
        """Its single error line."""
        lines = [line for line in self.said().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.said()
        return lines[0]


def ended(started: Sequence[Started], within_s: float = START_S) -> list[int]:
    """The exit codes, after all have ended."""
    end = time.monotonic() + within_s
    codes = []
    for one in started:
        try:
            codes.append(one.process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{one.log.name} did not end:\n{one.said()}") from error
    return codes


def until(done: Callable[[], bool], started: Sequence[Started], within_s: float = START_S) -> None:
    """Poll until ``done``; fails if a process ends first."""
    end = time.monotonic() + within_s
    while not done():
        for one in started:
            assert one.process.poll() is None, f"it ended first:\n{one.said()}"
        assert time.monotonic() < end, "\n".join(one.said() for one in started)
        time.sleep(0.05)
