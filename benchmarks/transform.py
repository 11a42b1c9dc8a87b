"""Measures seconds and memory of changes of layout: ours, MindSpore's, DCP's, and a plain copy of the bytes.

All of them convert the same model, in turn: A B C A B C. Each call runs in its own process, which has
imported everything before, with the source in the page cache. The first round is not timed: its memory is
measured, and its output compared with the expected one. Run it on an idle machine, in the folder above this
one:

    python -m benchmarks.transform [--mib 1024] [--blocks 5] [--cases tp pp hsdp] [--folder DIR] [--write]
        [--without-mindspore]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.checkpoints import CASES, grid, many, save_checkpoint, save_rank_files, save_strategy, wrong
from benchmarks.peers import MINDSPORE, python
from benchmarks.processes import pss
from benchmarks.transform_calls import dcp_source
from launcher.checkpoint import Strategy
from launcher.checkpoint.layout.strategy_file import dump
from launcher.checkpoint.transform import sources
from launcher.checkpoint.write import saved_boxes
from launcher.extras.mindspore.rank_files import held_boxes

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "transform.md"
COPY = "cp -r, then sync of each file"

HEAD = """# Changes of layout, {mib} MiB of float32

`python -m benchmarks.transform --mib {mib} --blocks {blocks}` on {cores} cores, Linux, torch {torch}.
Seconds within the call, imports excluded: the median of {blocks} rounds, then the shortest and the longest.
Ratio: to the synced copy of the same bytes in the same round.
MiB: what the call adds to the memory of its processes.
MindSpore is 2.10.0 with numpy 1.26 and safetensors 0.7; it does not sync, and verifies no digest."""


@dataclass(frozen=True)
class Call:
    """One row: ``arguments`` of ``transform_calls``, run by ``python``.

    ``form``: the form of the output.
    """

    name: str
    does: str
    python: str
    arguments: tuple[str, ...]
    form: str


def calls(work: Path, case: str, mib: int, mindspore: Path | None) -> Iterator[Call]:
    me = sys.executable
    own, ranks, out = (str(work / name) for name in ("own", "src", "dst"))
    safe = "digests verified and written, synced"
    plain = "shapes checked, synced"
    for n in ("1", "2"):
        yield Call(f"transform, workers={n}", safe, me, ("ours", own, out, str(work / "target"), n), "own")
    for n in ("1", "2"):
        words = ("rank_files", ranks, out, n)
        yield Call(f"transform_checkpoints, process_num={n}", plain, me, words, form="ranks")

    # others
    if mindspore is not None:
        words = ("mindspore", ranks, out, "1")
        yield Call("MindSpore's transform_checkpoints", "", str(mindspore), words, form="ranks")
    name = f"DCP, load and save on {CASES[case].dst.size} ranks"
    yield Call(name, "synced", me, ("dcp", str(work / "dcp"), out, str(mib), case), "dcp")
    yield Call("cp -r", "", me, ("copy", own, out, ""), "copy")
    yield Call(COPY, "synced", me, ("copy", own, out, "sync"), "copy")


def prepare(work: Path, case: str, mib: int) -> Strategy:
    """Write the source in every form, and return the strategy of the destination."""
    src, dst = CASES[case].strategies(mib)
    save_checkpoint(work / "own", src)
    dump(dst, work / "target")
    save_rank_files(work / "src", src)
    save_strategy(work / "src.ckpt", src)
    save_strategy(work / "dst.ckpt", dst)
    dcp_source(str(work / "dcp"), mib, case)
    return dst


def run(call: Call, work: Path, *, sampled: bool = False) -> tuple[float, int]:
    """Return the seconds of the call and, if ``sampled``, the peak growth in bytes of its processes."""
    shutil.rmtree(work / "dst", ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        # the process imports, creates the file ready, and waits for the file go
        signs, log = Path(made), Path(made) / "log"
        kind, *arguments = call.arguments
        command = [call.python, "-m", "benchmarks.transform_calls", kind, made, *arguments]
        with log.open("w") as file:
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        while not (signs / "ready").exists() and child.poll() is None:
            time.sleep(0.01)

        # the call itself
        before = peak = pss(child.pid)
        (signs / "go").touch()
        while sampled and child.poll() is None:
            peak = max(peak, pss(child.pid))
            time.sleep(0.02)
        if child.wait():
            raise SystemExit(f"{call.name} failed:\n{log.read_text()}")
        return float((signs / "seconds").read_text()), peak - before


def wrong_tensors(call: Call, work: Path, dst: Strategy) -> int:
    """Return the number of wrong tensors in the output; the call of DCP compares its tensors itself."""
    if call.form == "own":
        boxes = {rank: saved_boxes(dst, rank)["model.safetensors"] for rank in range(dst.grid.size)}
    elif call.form == "ranks":
        boxes = {rank: held_boxes(dst, rank) for rank in range(dst.grid.size)}
    else:
        return 0
    name = "model.safetensors" if call.form == "own" else "net{}.safetensors"
    return sum(wrong(work / "dst" / f"rank_{rank}" / name.format(rank), boxes[rank]) for rank in boxes)


def measured(work: Path, case: str, mib: int, blocks: int, mindspore: Path | None) -> Iterator[str]:
    """Yield the rows of the table."""
    dst = prepare(work, case, mib)
    todo = list(calls(work, case, mib, mindspore))

    # a round for memory and correctness, then rounds for time
    peaks: dict[str, int] = {}
    bad: dict[str, int] = {}
    for call in todo:
        _, peaks[call.name] = run(call, work, sampled=True)
        bad[call.name] = wrong_tensors(call, work, dst)
    times: dict[str, list[float]] = {call.name: [] for call in todo}
    for _ in range(blocks):
        for call in todo:
            times[call.name].append(run(call, work)[0])

    # the table
    for call in todo:
        seconds = times[call.name]
        ratio = [a / b for a, b in zip(seconds, times[COPY], strict=True)]
        does = f"**{bad[call.name]} tensors wrong**" if bad[call.name] else call.does
        yield (
            f"| {call.name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} - {max(seconds):.2f} "
            f"| {statistics.median(ratio):.2f} | {peaks[call.name] >> 20} | {does} |"
        )


def planned() -> float:
    """Return the seconds to plan the transform of 1000 parameters from 4096 ranks to 512."""
    names = [f"p{i}" for i in range(1000)]
    src = many(grid(pp=16, dp_shard=64, tp=4), names)
    dst = many(grid(pp=8, dp_shard=8, tp=8), names)
    began = time.perf_counter()
    sources(src, dst, dict(zip(names, names, strict=True)))
    return time.perf_counter() - began


def report(args: argparse.Namespace) -> Iterator[str]:
    mindspore, why = (None, "--without-mindspore") if args.without_mindspore else python(MINDSPORE)
    yield HEAD.format(mib=args.mib, blocks=args.blocks, cores=os.cpu_count(), torch=version("torch"))
    if mindspore is None:
        yield f"MindSpore was left out: {why}."
    for case in args.cases:
        yield f"\n## {CASES[case].name}\n"
        yield "| call | s | from - to | ratio | MiB | what else it does |"
        yield "|---|---|---|---|---|---|"
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="transform-") as made:
            yield from measured(Path(made), case, args.mib, args.blocks, mindspore)
    yield f"\n1000 parameters from 4096 ranks to 512 are planned in {planned():.2f} s."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--folder", type=Path, help="where the files are made, if not below /tmp")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    without = "do not install MindSpore to compare with"
    parser.add_argument("--without-mindspore", action="store_true", help=without)
    args = parser.parse_args()

    lines = []
    for line in report(args):
        print(line, flush=True)
        lines.append(line)
    if args.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
