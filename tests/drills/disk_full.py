"""A disk with little room, one that fills up, a deleted folder: one line says so, and the run resumes afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.checkpoint import latest, verify
from launcher.checkpoint.store import step_of
from tests.drills import Tally, forked, imported
from tests.mounts import unmount

TIMES = 60
SIZE_KB = 1024
STEPS = 24
TINY = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=16", "parallel.hsdp.threshold=0", "logger=plain", "recipe=lm_tied_pp2_hsdp2",
    f"train.steps={STEPS}", "checkpoint.every=5",
)  # fmt: skip
HOW = {
    "blocking": ("steps=[train,save]",),
    "async": ("steps=[train,save]", "checkpoint.async=true"),
    "encrypted": ("steps=[train,save]", "checkpoint.encrypt=env:DRILL_KEY"),
    "files": ("steps=[train,save,export,transform]", "logger.csv=true", "steps.export.check=false"),
    "continue": ("steps=[train,save]", "checkpoint.on_error=continue"),
    "continue async": ("steps=[train,save]", "checkpoint.on_error=continue", "checkpoint.async=true"),
    "norms": ("steps=[train,save]", "parallel.local_norm.dump=run:norms"),
    "inproc": ("steps=[train,save]", "debug=onerank", "launch.mode=inproc"),
}
NEEDED = r"No space left on device: the file needs \d+ bytes, \d+ are free"
GONE = r"was deleted or moved during the run|No such file or directory"
TOLD = {"little room": NEEDED, "fills up": NEEDED, "deleted": GONE,
        "deleted checkpoints": GONE}  # fmt: skip
HARMS = ("little room", "little room", "fills up", "fills up", "deleted", "deleted checkpoints")


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    """Run the drill as root, which may mount a file system of 1 MiB."""
    tally = Tally()
    imported()
    os.environ["DRILL_KEY"] = "ab" * 32
    with disk(folder / "disk", SIZE_KB) as small:
        straight: dict[str, list[object]] = {}
        for n in range(times):
            how = [*HOW][n % len(HOW)]
            if how not in straight:
                straight[how] = _straight(how, folder)
            told = _try(how, chance, small, folder / f"{n}.log", straight[how])
            right = told in ("right", "over")
            tally.note(told if right else f"wrong ({how})", "" if right else told)
    return tally


@contextmanager
def disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """Mount a file system of so many KiB. Raises ``PermissionError`` if this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "launcher-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        unmount(folder)


def leave(small: Path, kb: int) -> None:
    """Fill the disk so that only ``kb`` KiB are free."""
    free = shutil.disk_usage(small).free
    with (small / "ballast").open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, file.tell() + free - kb * 1024))


def _try(how: str, chance: random.Random, small: Path, log: Path, straight: list[object]) -> str:
    run_dir, harm = small / "run", chance.choice(HARMS)
    words = (*TINY, *HOW[how], f"run_dir={run_dir}")
    room = chance.randrange(4, 800)
    if harm == "little room":
        leave(small, room)
    code = forked(words, log, lambda: _harm(harm, chance, small, run_dir))
    try:
        told = _judged(harm, code, log.read_text(), run_dir)
        if told != "right":
            return f"{harm} ({room} KiB): {told}" if told != "over" else told
        last = latest(run_dir / "checkpoints")
        if last is not None and how != "encrypted" and (wrong := verify(last)):
            return f"{harm}: the last checkpoint is damaged: {wrong}"
        (small / "ballast").unlink(missing_ok=True)
        if forked(words, log) != 0:
            return f"{harm}: does not go on: {log.read_text()[-400:]}"
        if last is not None and step_of(last) != STEPS and f"resuming from {last.name}," not in log.read_text():
            return f"{harm}: did not go on from {last.name}: {log.read_text()[-400:]}"
        return "right" if _rows(run_dir) == straight else "goes on to other numbers"
    finally:
        for path in small.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _harm(harm: str, chance: random.Random, small: Path, run_dir: Path) -> None:
    """Do the harm once, at a random time after the run folder exists; it is called repeatedly."""
    done = (small / "ballast").exists() or harm == "little room"
    if done or not (run_dir / "status.json").exists() or chance.random() > 0.02:
        return
    (small / "ballast").touch()
    if harm == "fills up":
        leave(small, chance.choice((0, 0, 4, 16, 64, 200)))
    elif harm == "deleted":
        shutil.rmtree(run_dir, ignore_errors=True)
    else:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def _judged(harm: str, code: int | None, said: str, run_dir: Path) -> str:
    """Return the outcome; ``over``: the run succeeded."""
    if code is None:
        return f"still running: {said[-200:]}"
    if "Traceback" in said or "Logging error" in said:
        return f"traceback: {said[-900:]}"
    left = [p.name for p in run_dir.rglob("*") if ".status.json" in p.name or p.name.endswith(".partial")]
    left += [p.name for p in run_dir.rglob(".*") if p.name != ".lock"]
    if left:
        return f"left behind: {left}"
    if code == 0:
        return "over"
    heads = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 2:
        return "right" if not (run_dir / "status.json").exists() else f"refused, and begun: {said[-300:]}"
    if len(heads) != 1 or not re.search(TOLD[harm], heads[0]):
        return f"does not say why: {heads or said[-300:]}"
    if not (run_dir / "status.json").exists():
        return "right"  # the status could not be written there
    status = json.loads((run_dir / "status.json").read_text())
    if status["status"] != "failed" or not re.search(TOLD[harm], status.get("error", "")):
        return f"the status says {status['status']}: {status.get('error')}"
    return "right"


def _straight(how: str, folder: Path) -> list[object]:
    run_dir = folder / f"straight {how}"
    words = [word for word in HOW[how] if "on_error" not in word]
    assert forked((*TINY, *words, f"run_dir={run_dir}"), folder / "straight.log") == 0
    return _rows(run_dir)


def _rows(folder: Path) -> list[object]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss")) for row in rows]
