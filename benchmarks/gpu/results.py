"""Keeps the lab's results: every row as JSON, a page to read, and the device as a fragment of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gpu.lab import Row
from benchmarks.gpu.parts import parts
from launcher.runtime.training.profiler import shortened

TRAINING = (
    ("ms", "ms", 1.0), ("tokens_per_s", "tokens/s", 1.0), ("mfu", "MFU %", 100.0),
    ("planned_ms", "planned ms", 1.0), ("planned_ms_with_cluster", "with the cluster", 1.0),
    ("measured_bytes", "GB", 1e-9), ("planned_bytes", "planned GB", 1e-9),
    ("planned_bytes_with_cluster", "with the cluster", 1e-9), ("first_step_s", "first step s", 1.0),
)  # fmt: skip
"""Columns of the table of training: the key of the value, the title, and the factor."""
GROUPED = ("products", "attention", "rest")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a line per part for the terminal; a part that failed has its reason."""
    out = []
    for row in rows:
        ms = row.values.get("ms")
        said = row.why or row.values.get("verdict") or (f"{ms:.1f} ms" if ms is not None else "")
        out.append(f"{'ok' if row.ok else 'FAILED':<7}{row.part:<28}{row.seconds:>7.1f} s  {said}".rstrip())
    return out


class Record:
    """Writes ``<card>-<date>.jsonl``, a line as soon as a part ends, and from it the ``.md`` and ``.yaml``.

    It never overwrites an older record: the second record of a day is called ``<card>-<date>-2``.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{facts['slug']}-{facts['date']}"
        names = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
        self.path = next(p for name in names if not (p := folder / f"{name}.jsonl").exists())
        self._append(facts)

    def add(self, row: Row) -> None:
        self._append(asdict(row))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def render(self) -> list[Path]:
        """Write the page and, if kernels were measured, the fragment; return the paths of all files."""
        facts, rows = read(self.path)
        page_path = self.path.with_suffix(".md")
        page_path.write_text(page(facts, rows))
        for row in rows:
            if row.part == "kernels" and row.values.get("blocks"):
                yaml_path = self.path.with_suffix(".yaml")
                yaml_path.write_text(fragment(facts, row.values))
                return [self.path, page_path, yaml_path]
        return [self.path, page_path]


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read a ``.jsonl``: the facts of the device, and the rows in the order of the lab's parts."""
    facts, *rows = map(json.loads, path.read_text().splitlines())
    order = [part.name for part in parts()]
    return facts, sorted((Row(**row) for row in rows), key=lambda row: order.index(row.part))


def page(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    said = f"{facts['versions']}; `{facts['request']}`. Each figure is of one run, a step is a median."
    lines = [f"# {facts['device']}, {facts['date']}", "", said]
    lines += ["", facts["note"]] if facts.get("note") else []
    lines += _section("Training", _training(rows))
    lines += _section("Kernels of one step", _kernel_tables(rows))
    lines += _section("Starts, certificates, tests", _parts(rows))
    for row in rows:
        if row.part == "kernels":
            lines += _device(row.values)
        if row.part == "calibrate" and "cluster" in row.values:
            shown = ", ".join(f"{name} {ms}" for name, ms in row.values.get("planned_ms", {}).items())
            lines += ["", "## Calibrated", "", f"Planned with it, ms: {shown}.", "", "```yaml"]
            lines += [*row.values["cluster"].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _section(name: str, lines: list[str]) -> list[str]:
    return ["", f"## {name}", "", *lines] if lines else []


def _training(rows: Sequence[Row]) -> list[str]:
    shown = [row for row in rows if "ms" in row.values]
    columns = [c for c in TRAINING if any(row.values.get(c[0]) is not None for row in shown)]
    cells = [
        [row.part, *(_number(row.values.get(key), factor) for key, _, factor in columns)] for row in shown
    ]
    out = table(["part", *(name for _, name, _ in columns)], cells) if shown else []
    for row in rows:
        if "losses_apart" in row.values:
            apart, ratio = row.values["losses_apart"], row.values["speed_against_by_hand"]
            out += [
                "",
                f"The loop by hand around the same model: losses {apart:.1e} apart, {ratio}x its speed.",
            ]
    return out


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.5g}"


def _kernel_tables(rows: Sequence[Row]) -> list[str]:
    """Return the sums of the groups, and the ten slowest kernels of each profiled step, side by side."""
    shown = [row for row in rows if row.values.get("kernels")]
    if not shown:
        return []
    sums = [[r.part, _number(r.values["kernels_ms"]), *_groups(r.values)] for r in shown]
    out = table(["part", "all ms", *GROUPED], sums)
    cells = []
    for n in range(10):
        line: list[str] = []
        for row in shown:
            name, calls, ms = (row.values["kernels"] + [["", "", None]] * 10)[n]
            line += [_number(ms), str(calls), f"`{shortened(name)}`" if name else ""]
        cells.append(line)
    head = [word for row in shown for word in (f"{row.part} ms", "calls", "kernel")]
    return [*out, "", *table(head, cells)]


def _groups(values: dict[str, Any]) -> list[str]:
    return [_number(values.get("groups_ms", {}).get(name)) for name in GROUPED]


def _parts(rows: Sequence[Row]) -> list[str]:
    shown = [row for row in rows if row.part.partition(".")[0] in ("start", "certify", "tests") or not row.ok]
    cells = []
    for row in shown:
        counts = ", ".join(f"{n} {word}" for word, n in row.values.get("counts", {}).items())
        failed = "; ".join(row.values.get("failures", []))
        said = [row.why, row.values.get("verdict", ""), counts, failed]
        text = "; ".join(word for word in said if word).replace("|", "/")
        cells.append(
            [row.part, "ok" if row.ok else "failed", f"{row.seconds:.1f}" if row.seconds else "", text]
        )
    return table(["part", "", "s", ""], cells) if cells else []


def _device(values: dict[str, Any]) -> list[str]:
    """Return the tables of attention, blocks, products and copies."""
    peak = values.get("peak")
    lines = []
    if values.get("attention"):
        head = ["kernel", "keys", "forward ms", "forward and backward ms"]
        cells = [
            [
                a["kernel"],
                a["keys"],
                a.get("refused") or _number(a.get("forward_ms")),
                _number(a.get("both_ms")),
            ]
            for a in values["attention"]
        ]
        lines += _section("Attention", table(head, cells))
    if values.get("blocks"):
        cells = [
            [
                b["kind"],
                _number(b["forward"], 1e3),
                _number(b["both"] - b["forward"], 1e3),
                *_rate(b["flops"], b["forward"], peak),
            ]
            for b in values["blocks"]
        ]
        head = ["kind", "forward ms", "backward ms", "forward TFLOP/s", "of peak"]
        lines += _section(f"Blocks of {values['batch'][0]} x {values['batch'][1]} tokens", table(head, cells))
    if values.get("products"):
        cells = [
            [
                f"{p['m']} x {p['k']} x {p['n']}",
                _number(p["seconds"], 1e3),
                *_rate(_flops(p), p["seconds"], peak),
            ]
            for p in values["products"]
        ]
        lines += _section("Products", table(["m x k x n", "ms", "TFLOP/s", "of peak"], cells))
    if values.get("copies"):
        cells = [
            [c["what"], f"{c['nbytes'] / 2**20:.0f}", _number(c["nbytes"] / c["seconds"], 1e-9)]
            for c in values["copies"]
        ]
        lines += _section("Copies", table(["what", "MiB", "GB/s"], cells))
    return lines


def _flops(product: dict[str, Any]) -> float:
    return 2.0 * product["m"] * product["n"] * product["k"]


def _rate(flops: float, seconds: float, peak: float | None) -> list[str]:
    rate = flops / seconds
    return [_number(rate, 1e-12), "" if peak is None else f"{rate / peak:.1%}"]


def fragment(facts: dict[str, Any], values: dict[str, Any]) -> str:
    """Return measured numbers in SI units as YAML; only ``peak_tflops`` is from a data sheet."""
    return "\n".join(_fragment(facts, values)) + "\n"


def _fragment(facts: dict[str, Any], values: dict[str, Any]) -> Iterator[str]:
    peak = values["peak"]
    yield f"# One device of a cluster, as measured: {facts['date']}, {facts['versions']}"
    yield f"device: {facts['device']}"
    yield f"dtype: {values['dtype']}  # of products and blocks"
    yield f"memory_gb: {facts['memory'] / 1e9:.1f}  # all of it"
    tera = "null" if peak is None else f"{peak / 1e12:g}"
    yield f"peak_tflops: {tera}  # by the data sheet, dense; null: not known"
    yield "matmul:  # m x k times k x n; efficiency is the share of peak_tflops"
    for p in values["products"]:
        rate = _flops(p) / p["seconds"]
        part = "null" if peak is None else f"{rate / peak:.3f}"
        shape = f"m: {p['m']}, k: {p['k']}, n: {p['n']}"
        yield f"  - {{{shape}, tflops: {rate / 1e12:.4g}, efficiency: {part}}}"
    yield f"copy_gb_per_s:  # of {values['copies'][0]['nbytes']} bytes"
    for c in values["copies"]:
        yield f"  {c['what'].replace(' ', '_')}: {c['nbytes'] / c['seconds'] / 1e9:.4g}"
    yield f"blocks:  # a micro batch of {values['batch'][0]} x {values['batch'][1]} tokens"
    for b in values["blocks"]:
        times = f"forward_ms: {b['forward'] * 1e3:.4g}, backward_ms: {(b['both'] - b['forward']) * 1e3:.4g}"
        yield f"  {b['kind']}: {{{times}, forward_gflop: {b['flops'] / 1e9:.4g}}}"
