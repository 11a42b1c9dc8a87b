"""The report page of a run."""

from __future__ import annotations

import logging
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.checkpoint.tensorfile.watched_folder import identity
from launcher.errors import error_text
from launcher.extras.report.chart import chart
from launcher.run.curve import Curve, sparkline

REFRESH_S = 15
"""Seconds between reloads of the page while the run is running."""
TOGETHER = {
    "loss": ("loss", "val_loss", "val_loss_ema"),
    "step_ms_worst": ("step_ms_worst", "step_ms_median"),
}
"""The curves that share a chart, by the key of the first one."""
FIRST_OF = {"loss": "training", "step_ms_worst": "the slowest"}
FIRST = ("loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_ms", "step_ms_worst", "memory_mb")
LABELS = {
    "lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s", "step_ms": "ms a step", "memory_mb": "memory of rank 0, MB",
    "val_loss": "validation", "val_loss_ema": "validation, EMA weights",
    "step_ms_worst": "ms of a rank's own work", "step_ms_median": "median of ranks",
}  # fmt: skip
LEFT_OUT = ("step", "steps", "bubble", "worst_rank")
"""Row entries without a chart: step counts, the planned bubble (constant), and the number of a rank."""
STYLE = (
    "body{font-family:sans-serif;color:#24292f;max-width:1180px;margin:24px auto;padding:0 16px}"
    "h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 8px}p{margin:6px 0}a{color:#2c6fbb}"
    ".soft{color:#6e7781}.bar{background:#eaeef2;height:8px;border-radius:4px;margin:10px 0}"
    ".bar div{background:#2c6fbb;height:8px;border-radius:4px}.bad{color:#cf222e}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:12px}"
    "pre{background:#f6f8fa;padding:12px;overflow:auto;font-size:12px}img{max-width:100%}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 14px 3px 0;text-align:left}"
)


@dataclass(frozen=True)
class PageContent:
    """The content of a page.

    ``status``: running, done, or how it ended. ``changes``: the overrides of the request. ``pictures``: SVG
    texts by title. ``kernels``: tables of profiled kernels. ``files``: paths in the run folder.
    """

    name: str
    status: str
    curves: Mapping[str, Curve]
    steps: int
    changes: Sequence[str]
    plan: str
    pictures: Mapping[str, str]
    files: Sequence[str]
    kernels: Sequence[str] = ()


def page(content: PageContent) -> str:
    running = content.status == "running"
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if running else ""
    return "\n".join([
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}',
        f"<title>{escape(content.name)}: {escape(content.status)}</title><style>{STYLE}</style></head><body>",
        *_head(content),
        *_charts(content.curves),
        *_pictures(content.pictures),
        *_kernels(content.kernels),
        *_settings(content.changes),
        f"<h2>Plan</h2><details><summary>show</summary><pre>{escape(content.plan)}</pre></details>",
        *_files(content.files),
        "</body></html>\n",
    ])  # fmt: skip


def _head(content: PageContent) -> Iterator[str]:
    done = max((c.points[-1].last for c in content.curves.values() if len(c)), default=0)
    steps = max(content.steps, done)
    bad = "" if content.status in ("running", "done") else ' class="bad"'
    yield f"<h1>{escape(content.name)}</h1>"
    status = f"<span{bad}>{escape(content.status)}</span>"
    yield f'<p>{status} <span class="soft">step {done} of {steps}</span></p>'
    yield f'<div class="bar"><div style="width:{100 * done / max(steps, 1):.1f}%"></div></div>'
    rows = [(_label(key), content.curves[key].points[-1].mean) for key in _order(content.curves)]
    if rows:
        yield (
            "<table><tr>" + "".join(f'<th class="soft">{escape(name)}</th>' for name, _ in rows) + "</tr><tr>"
        )
        yield "".join(f"<td>{value:.6g}</td>" for _, value in rows) + "</tr></table>"


def _order(curves: Mapping[str, Curve]) -> list[str]:
    """Returns the figures to show: known ones first, then the others in the order of their appearance."""
    shown = [key for key in curves if key not in LEFT_OUT and len(curves[key])]
    return [*(key for key in FIRST if key in shown), *(key for key in shown if key not in FIRST)]


def _label(key: str) -> str:
    return LABELS.get(key, key)


def _charts(curves: Mapping[str, Curve]) -> Iterator[str]:
    yield '<h2>Curves</h2><div class="charts">'
    shown: set[str] = set()
    for key in _order(curves):
        if key in shown:
            continue
        keys = [k for k in TOGETHER.get(key, (key,)) if k in curves and len(curves[k])]
        shown.update(keys)
        alone = len(keys) == 1
        named = {"" if alone else FIRST_OF[key] if k == key else _label(k): curves[k] for k in keys}
        yield f"<div>{chart(_label(key), named)}</div>"
    yield "</div>"


def _pictures(pictures: Mapping[str, str]) -> Iterator[str]:
    """Embeds pictures as images, so that their styles stay separate."""
    for title, svg in pictures.items():
        data = b64encode(svg.encode()).decode()
        yield f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _kernels(tables: Sequence[str]) -> Iterator[str]:
    if tables:
        yield "<h2>The slowest kernels</h2>"
        yield from (f"<pre>{escape(table)}</pre>" for table in tables)


def _settings(changes: Sequence[str]) -> Iterator[str]:
    if changes:
        yield "<h2>Overrides</h2><pre>" + escape("\n".join(changes)) + "</pre>"


def _files(files: Sequence[str]) -> Iterator[str]:
    if files:
        links = (f'<a href="{quote(name)}">{escape(name)}</a>' for name in files)
        yield f"<h2>Files</h2><p>{' &middot; '.join(links)}</p>"


_log = logging.getLogger(__name__)

REPORT_FILE = "report.html"
EVERY_S = 10.0
SHARE = 50
"""The least time between two updates, as a multiple of the time to write one."""
PICTURES = {"One step, as planned": "timeline.svg", "Memory over a step, as planned": "memory.svg"}
LINKS = (
    "command.txt", "config.yaml", "plan.txt", "plan.json", "metrics.jsonl", "metrics.csv", "status.json",
    "certificate.json", "timeline.svg", "memory.svg", "checkpoints", "exports", "graphs", "logs", "profile",
    "strategy",
)  # fmt: skip


KERNELS = "profile/rank*.txt"
"""Tables of profiled kernels, one per rank."""


class RunReport:
    """Collects the rows of the metrics and writes the page from time to time.

    ``before``: the rows of earlier starts. If the page cannot be written, one warning says so, and the run
    continues.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        changes: Sequence[str] = (),
        before: Iterable[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.curves: dict[str, Curve] = {}
        self._run, self._name, self._changes, self._clock = run, name, tuple(changes), clock
        self._began = identity(run)
        self._steps = 0
        self._due = clock()
        self._failed = False
        for row in before:
            self._add(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.curves:
            self._write(_ended(error))

    def feed(self, row: Mapping[str, Any]) -> None:
        self._add(row)
        if self._clock() >= self._due:
            begun = self._clock()
            self._write("running")
            now = self._clock()
            self._due = now + max(EVERY_S, SHARE * (now - begun))

    def loss(self, width: int = 40) -> str:
        """Returns the loss curve as a line of text; "" with fewer than two values."""
        curve = self.curves.get("loss", Curve())
        if len(curve) < 2:
            return ""
        values = [p.mean for p in curve]
        return f"loss {values[0]:.4f} {sparkline(values, width)} {values[-1]:.4f}"

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int):
            return
        self._steps = int(row.get("steps", self._steps))
        for key, value in row.items():
            if key not in ("step", "steps") and isinstance(value, int | float):
                self.curves.setdefault(key, Curve()).add(step, float(value))

    def _write(self, status: str) -> None:
        moved = self._began is not None and identity(self._run) != self._began
        if moved:  # the run folder was replaced or removed; the run reports that itself
            return
        try:
            write_text(self._run / REPORT_FILE, page(self._content(status)))
        except Exception as error:  # no error of the report may end a run
            if not self._failed:
                path, why = (
                    self._run / REPORT_FILE,
                    error_text(error).removeprefix(f"{self._run / REPORT_FILE}: "),
                )
                _log.warning("%s: %s; the run continues without it", path, why)
            self._failed = True

    def _content(self, status: str) -> PageContent:
        return PageContent(
            name=f"{self._name} {self._run.name}",
            status=status,
            curves=self.curves,
            steps=self._steps,
            changes=self._changes,
            plan=self._text("plan.txt"),
            pictures={t: text for t, name in PICTURES.items() if (text := self._text(name))},
            kernels=[path.read_text(encoding="utf-8") for path in sorted(self._run.glob(KERNELS))],
            files=[name for name in LINKS if (self._run / name).exists()],
        )

    def _text(self, name: str) -> str:
        path = self._run / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def _ended(error: BaseException | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, Exception):
        return f"failed: {error_text(error)}".splitlines()[0]
    return type(error).__name__.lower()  # interrupted, preempted
