"""Makes bad checkpoints, and shows how programs that convert checkpoints react to them.

The programs convert a checkpoint of four ranks to one of two ranks (MindSpore, ours) or to one file (DCP,
DeepSpeed). If a program reports no error, its output is compared with the right one. Run it in the folder
above this one:

    python -m benchmarks.bad_checkpoints [--write]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bad_calls import Program, run
from benchmarks.bad_inputs import EVERYWHERE, MARK, RANK_FILES, SHAPES, STAGES, Damage, GoodCheckpoint, net
from benchmarks.checkpoints import grid, save_checkpoint, save_rank_files, save_strategy, values, wrong
from benchmarks.peers import DEEPSPEED, MINDSPORE, python
from launcher.checkpoint.layout.shards import full_box
from launcher.checkpoint.layout.strategy_file import dump
from launcher.checkpoint.write import saved_boxes
from launcher.extras.mindspore.rank_files import held_boxes
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "bad_checkpoints.md"
HEAD = """# Bad checkpoints

`python -m benchmarks.bad_checkpoints` made every input and ran every program on it. MindSpore 2.10.0
(numpy 1.26, safetensors 0.7) and "launcher, plain files" get the same safetensors files, one a rank, which
carry no digests; "launcher" gets a checkpoint of its own. The strategies are in MindSpore's protobuf form,
which has no shapes that a swap of axes could contradict. DCP is torch's `dcp_to_torch_save`, DeepSpeed 0.19.8
its `zero_to_fp32` (ZeRO stage 2). "right": it returned, and every tensor is what it should be. "-": there is
no such input.
"""
PATTERNS = {
    "ranks": "rank_{}/net.safetensors",
    "own": "rank_{}/model.safetensors",
    "dcp": "__{}_0.distcp",
    "deepspeed": "step/zero_pp_rank_{}_mp_rank_00_optim_states.pt",
}
ERROR = re.compile(r"\b\w+(Error|Exception): ")
LAST = net(grid(tp=2))


@dataclass(frozen=True)
class Row:
    """One input, and the forms of checkpoints that it exists for.

    ``prefix``: the prefix of the files to write. ``crowded``: the destination has a rank of an older run.
    """

    text: str
    damage: Damage
    forms: tuple[str, ...]
    stages: int = 1
    prefix: str = "net"
    crowded: bool = False


def rows() -> Iterator[Row]:
    yield Row("nothing is wrong", lambda source: None, (*PATTERNS,))
    yield from (Row(text, damage, (*PATTERNS,)) for text, damage in EVERYWHERE.items())
    yield from (Row(text, damage, ("ranks", "own"), stages=2) for text, damage in STAGES.items())
    yield from (Row(text, damage, ("ranks",)) for text, damage in RANK_FILES.items())
    yield Row(
        "the prefix of the files to write is `../evil`", lambda source: None, ("ranks",), prefix="../evil"
    )
    yield Row(
        "the destination has a rank of an older, larger run",
        lambda source: None,
        ("ranks", "own"),
        crowded=True,
    )


def make(home: Path, form: str, stages: int, salt: str, deepspeed: str | None) -> None:
    """Write a good checkpoint; another ``salt`` gives other values."""
    of = net(grid(tp=4) if stages == 1 else grid(pp=2, tp=2))
    home.mkdir(parents=True)
    save_strategy(home / "src.ckpt", of)
    save_strategy(home / "dst.ckpt", LAST)
    dump(LAST, home / "target")
    if form == "own":
        save_checkpoint(home / "src", of, salt)
    elif form == "ranks":
        save_rank_files(home / "src", of, salt)
    elif form == "dcp":
        run_ranks(partial(_save_dcp, folder=str(home / "src"), salt=salt), 4)
    elif deepspeed is not None:
        _save_deepspeed(home, salt, deepspeed)


def _save_dcp(world: Any, folder: str, salt: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, state = init_device_mesh("cpu", (4,)), {}
    for name, entry in net(grid(tp=4)).entries.items():
        box, dims = entry.layout.box(world.rank), [d for d, axes in enumerate(entry.layout.split) if axes]
        assert box is not None
        piece = torch.from_numpy(values(name, box, salt))
        state[name] = DTensor.from_local(
            piece, mesh, [Shard(dims[0]) if dims else Replicate()], run_check=False
        )
    dcp.save(state, checkpoint_id=folder)


def _save_deepspeed(home: Path, salt: str, interpreter: str) -> None:
    import torch

    torch.save(
        {n: torch.from_numpy(values(n, full_box(s), salt)) for n, s in SHAPES.items()}, home / "values.pt"
    )
    launch = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launch, "-m", "benchmarks.deepspeed_source", str(home / "src"), str(home / "values.pt")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)


def cell(row: Row, program: Program, made: Path, work: Path) -> str:
    """Return what happened, as a cell of the table."""
    if program.form not in row.forms:
        return "-"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(made / f"{program.form}{row.stages}", work)
    older = made / f"{program.form}{row.stages}-older" / "src"
    row.damage(GoodCheckpoint(program.form, work / "src", older, PATTERNS[program.form]))
    out = work / "dst"
    if row.crowded:
        (out / "rank_7").mkdir(parents=True)
        (out / "rank_7" / "net7.safetensors").touch()
    fifth = work / "target" if program.call == "own" else work / "dst.ckpt"
    said = run(program, *map(str, (work / "src", out, row.prefix, work / "src.ckpt", fifth)))
    ran = "**runs it**; " if (work / MARK).exists() else ""
    if said is not None:
        left = [p for p in out.rglob("*") if p.is_file() and p.parent.name != "rank_7"]
        text = said[[0, *(m.start() for m in ERROR.finditer(said))][-1] :]  # some print the cause last
        text = text.replace(f"{work}/", "").replace("|", "\\|").replace("`", "'")
        text = text if len(text) < 110 else f"{text[:107]}..."
        return f"{ran}error: `{text}`" + (f"; **{len(left)} files are left**" if left else "")
    if row.crowded:
        return "**silent: the old rank stays beside the new ones**"
    if evil := sorted(p.relative_to(work).as_posix() for p in work.glob("*/evil*")):
        return f"**silent: writes {', '.join(evil)}, outside of the ranks' folders**"
    bad, of = wrong_tensors(program.form, out)
    return ran + (f"**silent: {bad} of {of} tensors wrong or missing**" if bad else "right")


def wrong_tensors(form: str, out: Path) -> tuple[int, int]:
    """Return the number of tensors of the output that are wrong or missing, and the number of all tensors."""
    if form in ("own", "ranks"):
        boxes = [
            saved_boxes(LAST, r)["model.safetensors"] if form == "own" else held_boxes(LAST, r)
            for r in range(2)
        ]
        paths = [out / f"rank_{r}" / ("model" if form == "own" else f"net{r}") for r in range(2)]
        found = [wrong(p.with_suffix(".safetensors"), b) for p, b in zip(paths, boxes, strict=True)]
        return sum(found), sum(map(len, boxes))
    import torch

    state: Mapping[str, Any] = torch.load(out / "whole.pt", weights_only=True)
    same = (
        n in state and state[n].equal(torch.from_numpy(values(n, full_box(s)))) for n, s in SHAPES.items()
    )
    return len(SHAPES) - sum(same), len(SHAPES)


def programs() -> Iterator[Program | str]:
    """Yield the programs that can run here, and for each of the others a line that says why it cannot."""
    for peer, name, form in ((MINDSPORE, "MindSpore", "ranks"), (DEEPSPEED, "DeepSpeed", "deepspeed")):
        found, why = python(peer)
        yield f"{name} was left out: {why}." if found is None else Program(name, peer.name, str(found), form)
    yield Program("DCP", "dcp", sys.executable, "dcp")
    yield Program("launcher, plain files", "files", sys.executable, "ranks")
    yield Program("launcher", "own", sys.executable, "own")


def report() -> Iterator[str]:
    yield HEAD
    every = [*programs()]
    yield from (text for text in every if isinstance(text, str))
    chosen = [program for program in every if isinstance(program, Program)]
    with tempfile.TemporaryDirectory(prefix="bad-") as folder:
        made = Path(folder)
        for form in dict.fromkeys(program.form for program in chosen):
            interpreter = next(program.python for program in chosen if program.form == form)
            for stages in (1, 2) if form in ("own", "ranks") else (1,):
                for salt in ("", "-older"):
                    make(made / f"{form}{stages}{salt}", form, stages, salt, interpreter)
        yield f"| input | {' | '.join(program.name for program in chosen)} |"
        yield "|---" * (len(chosen) + 1) + "|"
        for row in rows():
            cells = [cell(row, program, made, made / "case") for program in chosen]
            yield f"| {row.text} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_args()
    lines = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    if args.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with serving_from_here():
        main()
