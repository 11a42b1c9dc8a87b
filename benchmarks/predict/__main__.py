"""Adds what is predicted to a table of measurements: ``python -m benchmarks.predict IN.csv OUT.csv``."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.predict import report
from benchmarks.predict.fit import fit
from benchmarks.predict.frameworks import FITTED, SET_BY_HAND
from benchmarks.predict.plans import Planned, key, planned
from benchmarks.predict.rows import TIMES, read, write
from benchmarks.predict.values import seconds, timed, value

MOST_FITTED = 200
"""The most rows that constants are fitted to, drawn at random: more take longer and change nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__)
    parser.add_argument("table", type=Path, help="a row a measurement, as in benchmarks/predict/rows.py")
    parser.add_argument("out", type=Path, nargs="?", help="the rows, with what is predicted, or why not")
    parser.add_argument("--fit", choices=sorted(FITTED), help="print constants fitted on half of its models")
    parser.add_argument("--report", type=Path, help="write predict.md and its pictures into this folder")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    rows = read(args.table)
    if args.fit:
        print(_fitted(rows, args.fit, args.processes))
        return
    plans = planned(rows, args.processes)
    if args.out:
        write(args.out, [raw | _added(raw, plans[key(raw)]) for raw in rows])
    if args.report:
        report.write(args.report, rows, plans)


def _added(raw: dict[str, str], plan: Planned | str) -> dict[str, str]:
    if isinstance(plan, str):
        return {"predicted": "", "why": plan}
    return {"predicted": f"{value(raw, plan):.6g}", "why": ""}


def _fitted(rows: Sequence[dict[str, str]], framework: str, processes: int) -> str:
    """Return the constants that are fitted to half of the models, and the names of these models."""
    plans = planned([r for r in rows if r["metric"] in TIMES], processes)
    found = [c for c in timed(rows, plans) if c.plan.row.framework == framework]
    models = sorted({c.raw["model"] for c in found})
    mine = [c for c in found if c.raw["model"] in models[::2]]
    some = random.Random(0).sample(mine, min(MOST_FITTED, len(mine)))
    constants = fit([(c.plan, seconds(c)) for c in some], FITTED[framework], SET_BY_HAND[framework])
    said = ", ".join(f'"{name}": {number:.3g}' for name, number in constants.items())
    return f"{{{said}}}\nfitted to: {', '.join(models[::2])}"


if __name__ == "__main__":
    main()
