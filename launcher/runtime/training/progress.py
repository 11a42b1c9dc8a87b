"""Shows the progress of a run on the console."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from launcher.runtime import console_log

if TYPE_CHECKING:
    from rich.progress import TaskID

ProgressMode = Literal["auto", "bar", "plain", "off"]
DUMB = ("dumb", "unknown")  # values of TERM: terminals on which nothing can be redrawn
News = Mapping[str, Any]
Clock = Callable[[], float]


class SilentProgress:
    """Prints nothing; also the base of the other classes. Feed it the dict of each step and validation.

    Known keys: ``step``, ``steps``, ``loss``, ``lr``, ``grad_norm``, ``tokens_per_s`` or ``samples_per_s``,
    ``step_ms``; in a validation ``val_<what>``; ``text`` is a line to print. All but the first two are
    optional.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def feed(self, news: News) -> None:
        return None


class PlainProgress(SilentProgress):
    """Prints a line at the first and the last step, at every tenth of the way, and after 10 s without one."""

    def __init__(self, out: TextIO, clock: Clock) -> None:
        self._out = out
        self._pace = Pace(clock)
        self._clock = clock
        self._step: int | None = None
        self._at = 0.0

    def feed(self, news: News) -> None:
        text = message(news)
        if text is not None:
            print(text, file=self._out, flush=True)
        elif self._due(news["step"], news["steps"]):
            self._step, self._at = news["step"], self._clock()
            print(line(news, self._pace.seconds_left(news)), file=self._out, flush=True)
        else:
            self._pace.seconds_left(news)

    def _due(self, step: int, steps: int) -> bool:
        if self._step is None or step == steps or self._clock() - self._at >= 10:
            return True
        return step * 10 // steps > self._step * 10 // steps


class ProgressBar(SilentProgress):
    """A live bar, redrawn at most ten times a second; validations stay above it.

    Only ``feed`` draws it: a drawing thread would not survive the fork of a restart. ``copy`` gets the lines
    that ``PlainProgress`` prints.
    """

    def __init__(self, out: TextIO, clock: Clock, copy: TextIO | None = None) -> None:
        from rich.console import Console  # a run without a terminal needs no rich
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._lines = SilentProgress() if copy is None else PlainProgress(copy, clock)
        self._bar = RichProgress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=Console(file=out),
            auto_refresh=False,
            expand=True,
        )
        self._pace = Pace(clock)
        self._clock = clock
        self._task: TaskID | None = None
        self._drawn = float("-inf")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def feed(self, news: News) -> None:
        self._lines.feed(news)
        printed = message(news)
        if printed is not None:
            self._bar.console.print(printed, markup=False, highlight=False, soft_wrap=True)
            return

        # a training step: move the bar, unless it was drawn just now
        step, steps = news["step"], news["steps"]
        text = "  ".join(facts(news, self._pace.seconds_left(news)))
        if self._task is None:
            self._task = self._bar.add_task(text, total=steps, completed=step)
            self._bar.start()
            console_log.copy_streams()  # rich prints above the bar through its own streams
        draw = step == steps or self._clock() - self._drawn >= 0.1
        self._bar.update(self._task, completed=step, total=steps, description=text, refresh=draw)
        if draw:
            self._drawn = self._clock()


def progress(
    mode: ProgressMode = "auto", out: TextIO | None = None, clock: Clock = time.monotonic
) -> SilentProgress:
    """Returns a display; ``auto`` is a bar on a terminal and plain lines elsewhere. ``clock``: in seconds."""
    out = sys.stdout if out is None else out
    if mode == "auto":
        mode = "bar" if out.isatty() and os.environ.get("TERM") not in DUMB else "plain"
    if mode == "bar":
        return ProgressBar(console_log.terminal(out), clock, console_log.copy())
    return PlainProgress(out, clock) if mode == "plain" else SilentProgress()


class Pace:
    """Estimates the time left from the steps so far."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds_left(self, news: News) -> float | None:
        """Returns the seconds left; uses the first step's own ``step_ms`` until a second step is known."""
        step = news["step"]
        now = self._clock()
        if self._first is None or step < self._first[0]:  # a restart goes back
            self._first = step, now
        first_step, began = self._first
        if step > first_step:
            each = (now - began) / (step - first_step)
        elif "step_ms" in news:
            each = news["step_ms"] / 1000
        else:
            return None
        return float(each * (news["steps"] - step))


def message(news: News) -> str | None:
    """Returns the text to print on a separate line: a message or a validation.

    Returns ``None`` for a training step.
    """
    if "text" in news:
        return str(news["text"])
    values = {key: value for key, value in news.items() if key.startswith("val_")}
    figures = [f"{key.removeprefix('val_')} {value:.4f}" for key, value in values.items()]
    if not figures:
        return None
    after = [f"step {news['step']}"] if "step" in news else []
    return "  ".join([*after, "validation", *figures])


def line(news: News, left: float | None) -> str:
    """
    >>> line({"step": 40, "steps": 200, "loss": 2.31008, "lr": 0.0029, "tokens_per_s": 12345.6}, 21.4)
    'step 40/200  loss 2.3101  lr 2.9e-03  12.3k tokens/s  eta 0:21'
    """
    return "  ".join([f"step {news['step']}/{news['steps']}", *facts(news, left)])


def facts(news: News, seconds_left: float | None) -> list[str]:
    """Returns the readable figures of a training step; the last step shows no time left."""
    figures = [form(news[key]) for key, form in _FORMS.items() if key in news]
    return (
        figures
        if seconds_left is None or news["step"] == news["steps"]
        else [*figures, f"eta {span(seconds_left)}"]
    )


_FORMS: Mapping[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "lr": lambda value: f"lr {value:.1e}",
    "tokens_per_s": lambda value: f"{short(value)} tokens/s",
    "samples_per_s": lambda value: f"{short(value)} samples/s",
}


def short(value: float) -> str:
    """
    >>> short(7.25), short(999), short(12345.6), short(2.5e6)
    ('7.2', '999', '12.3k', '2.5M')
    """
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def span(seconds: float) -> str:
    """
    >>> span(21.4), span(3661)
    ('0:21', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
