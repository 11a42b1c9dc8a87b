"""The pages that people read, README.md and docs/, and what in them can be tried."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import invalidate_caches
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from launcher.__main__ import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GENERATED = ROOT / "docs/zoo.md"  # by `make test-zoo`
PAGES = [README, ROOT / "CONTRIBUTING.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p != GENERATED)]

BLOCK = re.compile(r"(?:<!-- (test|file): ([^\n]*) -->\n)?```(sh|python|yaml)\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"(<!-- (output|run): ([^\n]*) -->\n```text\n).*?(```)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
LAUNCHER = "python -m launcher "
DRY = "dry run"


@dataclass(frozen=True)
class Block:
    """A block that is not plain text. ``what`` the comment before it is (test or file), and the comment itself."""

    page: str
    what: str
    comment: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}: {self.text.partition(chr(10))[0]}"


def content(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def blocks(*languages: str) -> tuple[Block, ...]:
    """Of all pages, in their order."""
    found = ((page, m.groups(default="")) for page in PAGES for m in BLOCK.finditer(content(page)))
    return tuple(Block(page.relative_to(ROOT).as_posix(), *m) for page, m in found if m[2] in languages)


@cache
def files() -> dict[str, str]:
    """The files that pages show, by name. A name means one file, whichever pages show it."""
    shown = [(b.comment, b.text) for b in blocks("yaml", "python") if b.what == "file"]
    assert len(set(shown)) == len(dict(shown)), "pages show two files of one name"
    return dict(shown)


def write_files(folder: Path) -> None:
    for name, lines in files().items():
        (folder / name).write_text(lines)


def outputs() -> list[tuple[Path, str, str]]:
    """(page, output or run, command) of each output shown. An ``output`` is that of a command that starts no rank."""
    return [(page, m[2], m[3]) for page in PAGES for m in OUTPUT.finditer(content(page))]


def shell(script: str, cwd: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """As a user with the virtual environment active."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(["bash", "-euc", script], cwd=cwd, env=env, input=given, capture_output=True, text=True)


def answer(command: str, cwd: Path) -> tuple[int, str]:
    """Exit code and words of a launcher command that starts no rank, in this process, for which torch is there.

    Plans on our pages are those of a torch before 2.15, which holds more.
    """
    words, _, after = command.partition(" | ")
    out = StringIO()
    older = patch("launcher.planner.plan_job.keeps_messages", return_value=True)
    with older, _user(cwd), redirect_stdout(out), redirect_stderr(out):
        code = main(shlex.split(words.removeprefix(LAUNCHER)))
    return code, shell(after, cwd, out.getvalue()).stdout if after else out.getvalue()


@contextmanager
def _user(folder: Path) -> Iterator[None]:
    """``folder`` is where Python is at work; modules that are found there are forgotten afterwards."""
    before = set(sys.modules)
    invalidate_caches()
    with chdir(folder), patch.object(sys, "path", [str(folder), *sys.path]), patch.dict(os.environ, COLUMNS="120"):
        yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
