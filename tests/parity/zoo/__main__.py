"""``python -m tests.parity.zoo [--only NAME ...] [--layout L ...] [--turn] [--write]``: the zoo as a table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests import turns
from tests.parity.zoo import document, table
from tests.parity.zoo.case import chosen
from tests.parity.zoo.layouts import LAYOUTS

ROOT = Path(__file__).parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.zoo")
    parser.add_argument("--only", nargs="*", default=[], help="names of models; all")
    parser.add_argument("--layout", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), help="all")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="models at a time")
    parser.add_argument("--turn", action="store_true", help="only the models that CI tries now: tests/turns.py")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md, or the rows of a part")
    parser.add_argument("--refusals", action="store_true", help="print the text of every refusal")
    parser.add_argument("--failures", type=Path, help="a file for what failed")
    typed = parser.parse_args()
    if typed.write and typed.layout != list(LAYOUTS):
        parser.error("--write: docs/zoo.md has every layout, --layout tries a part")
    cases = turns.due(chosen(typed.only)) if typed.turn else chosen(typed.only)
    began = time.perf_counter()
    found = table.run(cases, typed.layout, typed.jobs)
    seconds = time.perf_counter() - began
    print(document.grid(found, typed.layout))
    if typed.refusals:
        print(document.refusals(found))
    print(f"{document.summary(found)}; {seconds:.0f} s, {typed.jobs} at a time")
    if typed.failures:
        typed.failures.write_text(document.failures(found))
    if typed.write:
        page = ROOT / "docs" / "zoo.md"
        part = typed.only or typed.turn
        page.write_text(document.updated(page.read_text(), found) if part else document.page(found))
    return 1 if list(table.failing(found)) else 0


if __name__ == "__main__":
    sys.exit(main())
