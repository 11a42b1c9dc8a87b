"""Damaged environments of torchrun and srun: one line soon says what is wrong or which rank is missing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.drills import Tally, forking, imported, waited
from tests.ports import free_port

TIMES = 120
TIMEOUT_S = 3
PATIENCE_S = 45
WORDS = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=12", "logger=plain", "steps=[train]", "recipe=lm_single", "train.steps=1", "launch.nproc=null",
    f"launch.timeout_s={TIMEOUT_S}",
)  # fmt: skip
VALUES = (
    "", " ", "x", "-1", "0", "1", "2", "3", "4", "1.5", " 1", "1\n", "0x1", "²", "١", "9" * 30, "a" * 5000, "localhost",
    "no-such-host.invalid", "127.0.0.1", "::1", "65535", "65536", "2(x2)", "4(x", "n[1-", "n[2-1]", "True", "$(id)",
)  # fmt: skip
Environment = dict[str, str | None]


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    """Every second try starts two processes, one of them with a damaged environment; the others start only that one."""
    tally = Tally()
    imported()
    for n in range(times):
        two = n % 2 == 1
        whole = [_torchrun, _srun][n // 2 % 2](2 if two else chance.choice((1, 2)))
        hurt = _damaged(whole[-1], chance)
        told = _try([*whole[:-1], hurt] if two else [hurt], folder / f"{n}")
        changed = {k: v for k, v in hurt.items() if v != whole[-1].get(k)}
        if told in ("right", "over"):
            tally.note(told)
        else:
            tally.note("wrong", f"{changed}: {told}")
    return tally


def _torchrun(size: int) -> list[Environment]:
    port = str(free_port())
    return [
        _of(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="localhost", MASTER_PORT=port, TORCHELASTIC_RESTART_COUNT="0")
        for rank in range(size)
    ]  # fmt: skip


def _srun(size: int) -> list[Environment]:
    port = str(free_port())
    return [
        _of(SLURM_PROCID=str(rank), SLURM_NTASKS=str(size), SLURM_STEP_NUM_TASKS=str(size), SLURM_LOCALID=str(rank),
            SLURM_STEP_TASKS_PER_NODE=str(size), SLURM_NODEID="0", SLURM_STEP_NODELIST="localhost", SLURM_JOB_ID="7",
            SLURM_STEP_ID="0", MASTER_ADDR="localhost", MASTER_PORT=port)
        for rank in range(size)
    ]  # fmt: skip


def _of(**variables: str | None) -> Environment:
    return variables


def _damaged(env: Environment, chance: random.Random) -> Environment:
    """Change or remove one variable or two."""
    names = chance.sample([*env], chance.choice((1, 1, 2)))
    return env | {name: chance.choice((None, *VALUES)) for name in names}


def _try(envs: list[Environment], folder: Path) -> str:
    """Return the outcome; ``over``: the run worked in spite of the damage."""
    folder.mkdir()
    logs = [folder / f"{n}.log" for n in range(len(envs))]
    words = (*WORDS, f"runs={folder}/runs")
    if len(envs) == 2:
        with forking(words, logs[0], envs[0]) as first, forking(words, logs[1], envs[1]) as second:
            codes = [waited(pid, PATIENCE_S) for pid in (first, second)]
    else:
        with forking(words, logs[0], envs[0]) as only:
            codes = [waited(only, PATIENCE_S)]
    said = [log.read_text() for log in logs]
    told = _judged(codes, said, (folder / "runs").exists())
    shutil.rmtree(folder)
    return told


def _judged(codes: list[int | None], said: list[str], written: bool) -> str:
    text = "\n".join(said)
    if None in codes:
        return f"still running after {PATIENCE_S} s: {text[-300:]}"
    if "Traceback" in text or "Fatal Python" in text or any(code not in (0, 1, 2) for code in codes):
        return f"{codes}: {text[-900:]}"
    if all(code == 0 for code in codes):
        return "over" if "done in" in text else f"nothing done: {text[-300:]}"
    if "error: " not in text:
        return f"{codes}, and no error: {text[-300:]}"
    if set(codes) == {2} and written:
        return f"refused, and written: {text[-300:]}"
    return "right"
