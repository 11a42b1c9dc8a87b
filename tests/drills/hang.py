"""SIGSTOP to a rank at random moments: the run ends soon after ``launch.timeout_s`` and names that rank."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from pathlib import Path

from tests.drills import Tally, launched, ranks, wait

TIMES = 26
TIMEOUT_S = 5
WORDS = ("recipe=tied_pp2_to_single", "checkpoint.every=5", f"launch.timeout_s={TIMEOUT_S}", "logger=plain")
PATIENCE_S = 60


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    for n in itertools.count():
        if tally.total() - tally["over"] >= times:
            break
        _try(tally, chance, folder / f"{n}")
    return tally


def _try(tally: Tally, chance: random.Random, folder: Path) -> None:
    with launched(folder.with_suffix(".log"), "launcher", *WORDS, f"run_dir={folder}") as process:
        while not (pids := ranks(process.pid)) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 4))
        while not (pids := ranks(process.pid)) and process.poll() is None:
            time.sleep(0.001)
        if process.poll() is not None:
            tally.note("over")
            return
        rank = chance.randrange(len(pids))
        try:
            os.kill(pids[rank], signal.SIGSTOP)
        except ProcessLookupError:
            tally.note("over")
            return
        code = wait(process, PATIENCE_S)
    said = folder.with_suffix(".log").read_text()
    line = next((line for line in said.splitlines() if line.startswith("error: ")), "no error")
    if code is None:
        tally.note("hung", f"rank {rank}: {said.splitlines()[-1:]}")
    elif code == 0:
        tally.note("over")
    elif re.match(rf"error: rank {rank} hung for {TIMEOUT_S} s \(launch.timeout_s\): it is stopped", line):
        tally.note("right")
    else:
        tally.note("misnamed", f"rank {rank}: {line}")
