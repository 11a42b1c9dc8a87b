"""``report.html`` of a sweep: its cells, the settings that led to the metric, and curves; drawn by a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from launcher.extras.sweep import page as sweep_page
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.ranking import Results, ranked_results
from launcher.job.sweep_grid import Cell
from launcher.run.curve import Curve

CHROMIUM = shutil.which("chromium")
SVG = "{http://www.w3.org/2000/svg}"


def cell(number: int, lr: float, kind: str) -> Cell:
    return Cell(f"{number}-{lr}-{kind}", (), (f"optim.lr={lr}", f"parallel.pipeline.scheduler={kind}"))


def curve(lr: float) -> Curve:
    out = Curve()
    for step in range(1, 20):
        out.add(step, 5.0 - step * lr)
    return out


def some(count: int = 6) -> Results:
    cells = [cell(n, 0.01 * 3**n, ("1f1b", "gpipe")[n % 2]) for n in range(count)]
    found = [CellResult(c, "done", {"val_loss": 3.0 - 0.1 * n, "step_ms": 5.0}) for n, c in enumerate(cells)]
    found.append(CellResult(cell(count, 9.0, "<b>"), "failed", error="rank 1: out of <luck>"))
    return ranked_results(found, {}, "val_loss", "min", {r.cell.name: curve(0.1 * n) for n, r in enumerate(found[:-1])})


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_report_lists_the_best_cell_first_and_escapes_markup():
    page = sweep_page.page("0001", some(), False, ["summary.csv"])
    rows = [re.sub("<[^>]+>", " ", row) for row in re.findall("<tr>.*?</tr>", page, re.DOTALL)]
    assert [row.split()[:3] for row in rows][:2] == [
        ["cell", "optim.lr", "parallel.pipeline.scheduler"],
        ["5-2.43-gpipe", "2.43", "gpipe"],
    ]
    assert "failed: rank 1: out of &lt;luck&gt;" in rows[-1]
    assert "<b>" not in page
    assert 'href="0-0.01-1f1b/report.html"' in page
    assert 'href="summary.csv"' in page
    assert "6 done, 1 failed" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", page)


def test_a_line_leads_from_each_cells_settings_to_its_metric():
    coordinates, losses = pictures(sweep_page.page("0001", some(), False, []))
    lines = [p for p in coordinates.iter(f"{SVG}path") if p.find(f"{SVG}title") is not None]
    assert [p.find(f"{SVG}title").text for p in lines][-1] == "5-2.43-gpipe: val_loss 2.5"  # the best is on top
    assert len(lines) == 6
    points = [re.findall(r"([\d.]+) ([\d.]+)", p.get("d")) for p in reversed(lines)]
    rates, kinds, values = (sorted({float(y) for _, y in axis}) for axis in zip(*points, strict=True))
    assert (len(rates), len(kinds), len(values)) == (6, 2, 6)
    gaps = [b - a for a, b in pairwise(rates)]
    assert max(gaps) - min(gaps) < 1  # rates of a geometric series are evenly spaced on a logarithmic axis
    heads = [t.text for t in coordinates.iter(f"{SVG}text") if t.get("class") == "head"]
    assert heads == ["optim.lr", "parallel.pipeline.scheduler", "val_loss"]
    assert losses.find(f"{SVG}title").text == "loss"
    assert len([p for p in losses.iter(f"{SVG}path") if p.get("stroke-width") == "1.5"]) == 6


@pytest.mark.parametrize("count", [0, 1], ids=["none", "one"])
def test_there_is_nothing_to_compare_with_one_cell(count):
    assert len(pictures(sweep_page.page("0001", some(count), True, []))) == count
    assert 'http-equiv="refresh"' in sweep_page.page("0001", some(count), True, [])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
def test_a_browser_draws_it(tmp_path: Path):
    sweep_page.write(tmp_path, some(), False, ["summary.csv"])
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1400"]
    shot = tmp_path / "page.png"
    subprocess.run(
        [*command, f"--screenshot={shot}", f"file://{tmp_path / sweep_page.REPORT_FILE}"], check=True, timeout=60
    )
    picture = Image.open(shot).convert("RGB")
    for top, bottom in ((120, 420), (460, 900)):  # the settings that lead to the metric, then the curves of the losses
        colors = picture.crop((0, top, 1240, bottom)).getcolors(1 << 24)
        assert sum(n for n, (r, g, b) in colors or [] if b - r > 60 and b > 120) > 300
