"""``python -m benchmarks.gpu``: runs the parts of the lab, prints a line of JSON for each, then a table."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu import results
from benchmarks.gpu.lab import Lab, PartContext, Row
from benchmarks.gpu.parts import parts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="parts, or first names of parts"
    )
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    parser.add_argument(
        "--dry", action="store_true", help="try all of it with a tiny model; times mean nothing"
    )
    parser.add_argument("--device", help="cpu, or the kind of an accelerator; else the one that is here")
    parser.add_argument("--cluster", help="the option of cluster that describes the device; else by its name")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together")
    parser.add_argument("--write", type=Path, help="a folder that gets <card>-<date>.jsonl, .md and .yaml")
    parser.add_argument("--keep", type=Path, help="a new folder that gets the logs of all parts")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.run is not None:
        run_part(args)
        return
    chosen = [part for part in parts() if part.chosen(args.only)]
    unknown = [w for w in args.only if not any(part.chosen([w]) for part in parts())]
    if args.list or unknown or not chosen:
        print("\n".join(f"{p.name:<28}{p.limit_s:>5g} s" for p in parts()))
        sys.exit(f"no part is named {', '.join(unknown)}" if unknown else 0)
    run_lab(args, [part.name for part in chosen])


def run_part(args: argparse.Namespace) -> None:
    """Run one part in this process, which reports its results or why it failed."""
    context = PartContext(args.run, args.folder, device=args.device, dry=args.dry, cluster=args.cluster)
    act = next(act for part, act in parts().items() if part.name == args.run)
    try:
        act(context)
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        context.report(why=f"{type(first).__name__}: {str(first).strip()[:600]}")
        raise


def run_lab(args: argparse.Namespace, names: Sequence[str]) -> None:
    facts = describe(args)
    print(json.dumps(facts), flush=True)
    signal.signal(signal.SIGTERM, _interrupted)
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    lab = Lab(
        [part for part in parts() if part.name in names],
        [sys.executable, "-m", "benchmarks.gpu", *_given(args, facts)],
        folder=folder,
        seconds=args.seconds,
    )
    record = results.Record(args.write or folder, facts)
    rows: list[Row] = []
    try:
        for row in lab.run():
            rows.append(row)
            record.add(row)
            print(row.line(), flush=True)
    finally:
        if args.keep is not None:
            shutil.copytree(folder, args.keep, ignore=shutil.ignore_patterns("compiled-*", "checkpoints"))
        print("\n".join(results.summary(results.read(record.path)[1])), flush=True)
        written = record.render()
        if args.write is not None:
            print("\n".join(map(str, written)))
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if all(row.ok for row in rows) else 1)


def _given(args: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    """Return the options that every part's process gets."""
    words = ["--device", facts["kind"], "--cluster", args.cluster or facts["cluster"]]
    return words + (["--dry"] if args.dry else [])


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of the device from another process, so that this one does not use the device."""
    code = "import sys; from benchmarks.gpu.device import facts; facts(*sys.argv[1:])"
    words = [args.device or "", "dry" if args.dry else ""]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"date": time.strftime("%Y-%m-%d"), **facts}


def _interrupted(signum: int, _: object) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
