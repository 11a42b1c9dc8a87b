"""A real Slurm on this machine: a controller and two nodes, with all their files below one folder. It needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

START_S = 60
DAEMONS = ("munged", "slurmctld", "slurmd")
KEY = Path("/etc/munge/munge.key")
CONF = """\
ClusterName=test
SlurmctldHost={controller.host}({controller.address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.%n.pid
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/%n
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd.%n.log
MpiDefault=none
JobRequeue=1
KillWait=20
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
"""Without cred_expire, a requeued job would wait two minutes."""
NODE = "NodeName={n.name} NodeHostname={n.host} NodeAddr={n.address} Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN"
"""A node claims more CPUs than the machine has."""


@dataclass(frozen=True)
class SlurmNode:
    """A Slurm node, with its name in Slurm, its host name and its address.

    ``inside``: the words before a command that runs on it.
    """

    name: str
    host: str
    address: str
    inside: tuple[str, ...] = ()


def missing() -> str:
    """Why these tests start no Slurm, in words; "" if they do."""
    if "SLURM_TEST" not in os.environ:
        return "make test-slurm starts a Slurm of its own"
    if os.geteuid():
        return "the daemons of Slurm are started as root"
    return lacking()


def lacking() -> str:
    """Which Slurm daemons are not installed, in words; "" if all are installed."""
    absent = [name for name in DAEMONS if _where(name) is None]
    return f"not installed: {', '.join(absent)}; make test-slurm installs them" if absent else ""


class NoSlurm(Exception):
    """Slurm is installed but does not start here; the message is that of its daemons."""


@contextmanager
def slurm(at: Path, nodes: Sequence[SlurmNode] = ()) -> Iterator[Path]:
    """Slurm's configuration file, for ``SLURM_CONF``. All processes end with the block.

    ``nodes``: by default two on the loopback of this machine; the controller runs on the first.

    Raises:
        NoSlurm: this machine does not let its daemons work.
    """
    nodes = nodes or [SlurmNode(name, _host(), "127.0.0.1") for name in ("n1", "n2")]
    at.mkdir()
    for name in ("state", *(node.name for node in nodes)):
        (at / name).mkdir()
    conf = at / "slurm.conf"
    started: list[subprocess.Popen[bytes]] = []
    try:
        _start(at, conf, nodes, started)
        yield conf
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _start(at: Path, conf: Path, nodes: Sequence[SlurmNode], started: list[subprocess.Popen[bytes]]) -> None:
    """Start the daemons and wait until a job has run on both nodes."""
    env = os.environ | {"SLURM_CONF": str(conf)}
    first = nodes[0]
    rows = [NODE.format(n=node, port=free_port()) for node in nodes]
    try:
        conf.write_text(CONF.format(controller=first, at=at, port=free_port(), nodes="\n".join(rows)))
        started.extend(_munged(at))
        started.append(_daemon(["slurmctld", "-D"], at, env, first.inside))
        started += [_daemon(["slurmd", "-D", "-N", node.name], at, env, node.inside) for node in nodes]
        until(lambda: _idle(first, env) == len(nodes), START_S, "the nodes are not idle")
        tried = [*first.inside, "srun", "-N2", "-n2", "--immediate=30", "true"]
        subprocess.run(tried, env=env, check=True, capture_output=True, text=True, timeout=START_S)
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        last = [line for out in sorted(at.glob("*.out")) for line in _tail(out)]
        raise NoSlurm("\n".join([str(error), said, *last])) from error


def _tail(out: Path) -> list[str]:
    return [f"{out.name}: {line}" for line in out.read_text(errors="replace").splitlines()[-2:]]


def until(done: Callable[[], bool], within_s: float, what: str) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def _where(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def _host() -> str:
    """This machine's host name, after making sure that it resolves to this machine."""
    host = socket.gethostname()
    hosts = Path("/etc/hosts")
    if host not in hosts.read_text().split():
        with hosts.open("a") as file:
            file.write(f"127.0.0.1 {host}\n")
    return host


def _munged(at: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The munge daemon that it starts, or none if one is already running."""
    if subprocess.run(["munge", "-n"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
        return
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge", KEY.parent):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(folder, "munge", "munge")
    if not KEY.is_file() or not KEY.stat().st_size:
        KEY.write_bytes(secrets.token_bytes(1024))
    shutil.chown(KEY, "munge", "munge")
    KEY.chmod(0o400)
    Path("/run/munge").chmod(0o755)
    yield _daemon(["runuser", "-u", "munge", "--", str(_where("munged")), "--foreground"], at, dict(os.environ))
    works = ["munge", "-n"]
    until(
        lambda: subprocess.run(works, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0,
        20,
        "munged does not answer",
    )


def _daemon(words: list[str], at: Path, env: dict[str, str], inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    with (at / f"{'-'.join(words[:1] + words[3:])}.out".replace("/", "_")).open("w") as out:
        command = [*inside, str(_where(words[0])), *words[1:]]
        return subprocess.Popen(command, env=env, stdout=out, stderr=out)


def _idle(first: SlurmNode, env: dict[str, str]) -> int:
    asked = [*first.inside, "sinfo", "-hN", "-o", "%T"]
    done = subprocess.run(asked, env=env, capture_output=True, text=True)
    return done.stdout.split().count("idle")
