"""``report.html`` of a run: what it shows, and that it exists however the run ends."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from launcher.__main__ import main
from launcher.extras.report.chart import chart
from launcher.extras.report.page import EVERY_S, REPORT_FILE, RunReport
from launcher.run.curve import MOST, Curve
from tests.run.launching import TINY, losses, run, shape

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium")


def curve(*values: float) -> Curve:
    out = Curve()
    for step, value in enumerate(values, 1):
        out.add(step, value)
    return out


def rows(*steps: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": n, "steps": 9, "loss": 10.0 - n} | more for n in steps]


def texts(page: str) -> list[str]:
    """Return the texts of each chart; the first one is its title."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return [" ".join(e.text or "" for e in svg.iter() if e.tag in (f"{SVG}title", f"{SVG}text")) for svg in found]


def test_a_curve_is_bounded_and_keeps_means_and_extremes() -> None:
    some = Curve()
    for step in range(1, 10 * MOST + 1):
        some.add(step, float(step % 7))
    assert MOST / 2 <= len(some) <= MOST
    assert sum(p.count for p in some) == 10 * MOST
    assert sum(p.total for p in some) == sum(step % 7 for step in range(1, 10 * MOST + 1))
    assert {(p.low, p.high) for p in some.points[1:-1]} == {(0.0, 6.0)}
    steps = [(p.first, p.last) for p in some]
    assert steps == sorted(steps)
    assert all(a[1] + 1 == b[0] for a, b in pairwise(steps))


def test_steps_that_are_trained_again_replace_their_points_of_a_curve() -> None:
    some = curve(4, 3, 2, 1)
    some.add(3, 2.5)
    assert [(p.last, p.mean) for p in some] == [(1, 4), (2, 3), (3, 2.5)]
    some.add(4, float("nan"))
    assert [p.last for p in some] == [1, 2, 3]


def test_a_chart_has_each_point_where_its_number_is() -> None:
    root = ElementTree.fromstring(chart("a < b", {"training": curve(5, 3, 1), "validation": curve(4)}))
    assert root.find(f"{SVG}title").text == "a < b"  # type: ignore[union-attr]
    circles = root.findall(f"{SVG}circle")
    titles = [c.find(f"{SVG}title").text for c in circles]  # type: ignore[union-attr]
    assert titles == [
        "training 5 at step 1", "training 3 at step 2", "training 1 at step 3", "validation 4 at step 1",
    ]  # fmt: skip
    (x1, y5), (x2, y3), (x3, y1), (_, y4) = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles]
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2)
    assert y5 < y4 < y3 < y1
    assert y3 - y5 == pytest.approx(y1 - y3, abs=0.2)
    assert y3 - y4 == pytest.approx(y4 - y5, abs=0.2)


@pytest.mark.parametrize("values", [(1.0,), (2.0, 2.0), (0.0, 0.0), (1e-9, 3e12), (-5.0, -4.0)], ids=str)
def test_any_numbers_can_be_drawn(values: tuple[float, ...]) -> None:
    text = chart("x", {"": curve(*values)})
    drawn = " ".join(p.get("d", "") for p in ElementTree.fromstring(text).iter(f"{SVG}path"))
    assert all(-1 <= float(n) <= 560 for n in re.findall(r"-?\d+\.\d", drawn))


def test_the_report_is_written_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    now = 0.0
    with RunReport(tmp_path, "lm", ("a=<b>",), rows(1, 2), clock=lambda: now) as report:
        report.feed(rows(3)[0])
        first = (tmp_path / REPORT_FILE).read_text()
        report.feed(rows(4)[0])
        assert (tmp_path / REPORT_FILE).read_text() == first
        now += EVERY_S
        report.feed(rows(5, val_loss=4.5)[0])
        later = (tmp_path / REPORT_FILE).read_text()
    done = (tmp_path / REPORT_FILE).read_text()
    assert [("running" in page, "step 3 of 9" in page) for page in (first, later, done)] == [
        (True, True), (True, False), (False, False),
    ]  # fmt: skip
    assert ['http-equiv="refresh"' in page for page in (first, later, done)] == [True, True, False]
    assert texts(done)[0].startswith("loss loss ")
    assert "a=<b>" in unescape(done)
    assert "a=<b>" not in done
    assert report.loss() == "loss 9.0000 █▆▅▃▁ 5.0000"
    assert not re.search(r"(src|href)=\"(https?:)?//", done)


def test_a_run_that_goes_on_has_one_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", *shape(), "train.eval_every=2", "schedule=constant", steps=4)
    out = capsys.readouterr().out
    assert re.search(r"\nloss \d\.\d{4} [▁-█]{4} \d\.\d{4}\ndone in ", out)
    run(folder, *shape(), "train.eval_every=2", "schedule=constant", steps=6)
    page = (folder / REPORT_FILE).read_text()
    told = re.findall(r"training ([\d.]+) at step (\d)", texts(page)[0])
    assert [float(n) for n, _ in told] == pytest.approx(losses(folder), rel=1e-5)
    assert [int(step) for _, step in told] == [1, 2, 3, 4, 5, 6]
    assert re.findall(r"validation [\d.]+ at step (\d)", texts(page)[0]) == ["2", "4"]
    assert "step 6 of 6" in page
    for name in re.findall(r'href="([^"]+)"', page):
        assert (folder / name).exists()
    assert {"metrics.jsonl", "plan.json", "checkpoints", "logs"} <= {*re.findall(r'href="([^"]+)"', page)}
    assert page.count("data:image/svg+xml;base64,") == 2


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    diary = f"callbacks=[{{_target_: tests.run.callbacks.Diary, path: {tmp_path}/d, fails: on_save}}]"
    words = [*TINY, f"run_dir={tmp_path}/bad", *shape(), "train.steps=3", "security.allow=[tests]", diary]
    assert main(words) == 1
    page = (tmp_path / "bad" / REPORT_FILE).read_text()
    assert re.search(r'<span class="bad">failed: .*on_save', page)
    assert "step 3 of 3" in page


def test_numbers_that_cannot_be_drawn_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunReport(tmp_path, "lm", clock=lambda: 0.0) as report:
        for value in (-1.7e308, 1.7e308):
            report.feed({"step": 1 + (value > 0), "steps": 9, "mine": value})
    assert [r.getMessage().endswith("; the run continues without it") for r in caplog.records] == [True]


def test_a_run_continues_if_its_report_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunReport(tmp_path / "gone", "lm") as report:
        report.feed(rows(1)[0])
        report.feed(rows(2)[0])
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.endswith("; the run continues without it")


def test_ranks_own_work_is_one_chart_and_no_rank_is_a_curve(tmp_path: Path) -> None:
    own = {"step_ms": 5.0, "step_ms_median": 3.0, "step_ms_worst": 4.0, "worst_rank": 1}
    with RunReport(tmp_path, "mine", (), rows(1, 2, **own)):
        pass
    titles = [text.partition(" ")[0] for text in texts((tmp_path / REPORT_FILE).read_text())]
    assert len(titles) == 3  # loss, ms a step, ms of a rank's own work
    (own_work,) = [
        text for text in texts((tmp_path / REPORT_FILE).read_text()) if text.startswith("ms of a rank's own work")
    ]
    assert "the slowest 4" in own_work
    assert "median of ranks 3" in own_work


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *shape(), steps=4)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,700"]
    shot = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={shot}", f"file://{folder / REPORT_FILE}"], check=True, timeout=60)
    colors = Image.open(shot).convert("RGB").crop((0, 180, 1240, 700)).getcolors(1 << 24)
    blue = sum(n for n, (r, g, b) in colors or [] if b - r > 100 and b > 150)
    assert blue > 300
