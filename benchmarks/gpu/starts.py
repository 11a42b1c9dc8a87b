"""Runs of the launcher itself: with its defaults, on the device, and with several ranks on one device."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.lab import PartContext

LAUNCHER = (sys.executable, "-m", "launcher")
TIMEOUT = "launch.timeout_s=60"
"""A rank that waits in vain for another one ends before the part's own time limit."""


class PartFailed(Exception):
    """A part does not show what it should."""


def launched(context: PartContext, *words: str) -> None:
    """Run one command as a user types it; its run folder is in the folder of the part."""
    log = context.folder / "run.log"
    with log.open("wb") as file:
        code = subprocess.call(
            [*LAUNCHER, *words, TIMEOUT, f"run_dir={context.folder / 'run'}"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    _report(context, [code], [log])


def on_device(context: PartContext, *words: str) -> None:
    """Run one rank on the device."""
    launched(context, *words, "launch.nproc=1", f"launch.device={context.device}")


def several(context: PartContext, ranks: int, *words: str) -> None:
    """Run ``ranks`` ranks on one device with its own collectives, each rank as a node of its own.

    NCCL refuses two ranks on one device of the same host, so each rank names another host.
    """
    port = _free_port()
    ends = ["launch.nproc=1", f"launch.nnodes={ranks}", f"launch.device={context.device}", TIMEOUT]
    logs = [context.folder / f"run.log.{rank}" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        place = {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"lab{rank}",
        }  # fmt: skip
        with log.open("wb") as file:
            started.append(
                subprocess.Popen(
                    [*LAUNCHER, *words, *ends, f"run_dir={context.folder / 'run'}"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {name: str(value) for name, value in place.items()},
                )
            )
    _report(context, [process.wait() for process in started], logs)


def _report(context: PartContext, codes: Sequence[int], logs: Sequence[Path]) -> None:
    """Report the values of a run that has ended.

    Raises ``PartFailed`` with the message of the launcher if the run failed.
    """
    context.report(exit_codes=list(codes), **figures(context.folder / "run"))
    warned = [line for line in _lines(logs) if "Warning" in line]
    if warned:
        context.report(warnings=sorted({line.strip()[:200] for line in warned})[:5])
    if any(codes):
        raise PartFailed(_reason(codes, logs))


def figures(run: Path) -> dict[str, object]:
    """The losses of a run, and the verdict of its certificate."""
    out: dict[str, object] = {}
    metrics = run / "metrics.jsonl"
    if metrics.exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        out["losses"] = [round(row["loss"], 5) for row in rows if "loss" in row][:5]
    certificate = run / "certificate.json"
    if certificate.exists():
        read = json.loads(certificate.read_text())
        out |= {"holds": read["holds"], "verdict": read["verdict"]}
    return out


def _reason(codes: Sequence[int], logs: Sequence[Path]) -> str:
    """The first line in which the launcher says what failed, else the last line of a rank that failed."""
    own = [line for line in _lines(logs) if re.match(r"error|rank \d+", line.strip())]
    failed = [log for code, log in zip(codes, logs, strict=True) if code]
    words = own[:1] or [line for line in _lines(failed[:1]) if line.strip()][-1:] or ["it wrote nothing"]
    return f"exit codes {sorted(set(codes))}: {words[0].strip()[:400]}"


def _lines(logs: Sequence[Path]) -> list[str]:
    return [line for log in logs for line in log.read_text(errors="replace").splitlines()]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def tests(context: PartContext) -> None:
    """Run the tests that need a device; report how many passed, and the names of those that did not.

    pytest-benchmark is disabled, because it turns a warning of xdist into an error.
    """
    chosen = ["-m", "gpu"] if not context.dry else ["-k", "step_says_what_is_known and cpu"]
    workers = ["-n", str(min(5, context.cores))] if _installed("xdist") and not context.dry else []
    timeout = ["--timeout", "60"] if _installed("pytest_timeout") else []
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "pytest", "-p", "no:benchmark", *chosen, *workers, *timeout,
            "-vv", "-rfE", "--tb=short", f"--basetemp={scratch}/tests", "tests/gpu",
        ]  # fmt: skip
        with (context.folder / "tests.log").open("wb") as log:
            running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        while (code := running.poll()) is None:
            time.sleep(1)
            context.report(**counted((context.folder / "tests.log").read_text(errors="replace")))
    context.report(**counted((context.folder / "tests.log").read_text(errors="replace")))
    if code:
        raise PartFailed(f"pytest ended with {code}")


def counted(text: str) -> dict[str, object]:
    """Return how many tests have ended so far with each outcome, and the names of those that did not pass.

    Verbose pytest prints a line per test; xdist puts the outcome first. The summary comes when all are done.
    """
    lines, _, summary = text.partition("short test summary info")
    counts = {word: len(re.findall(word, lines)) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failures = re.findall(r"^(?:FAILED|ERROR) (?:\S+::)?(.+)$", summary, re.MULTILINE)
    if not failures:
        failures = re.findall(r"(?:FAILED|ERROR) \S*::(\S+)", lines)
        failures += re.findall(r"::(\S+) (?:FAILED|ERROR)", lines)
    return {
        "counts": {word.lower(): n for word, n in counts.items() if n},
        "failures": sorted({line[:200] for line in failures}),
    }


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
