"""The pages that people read, README.md and docs/, and their parts that can be tested."""

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
    """A block that is not plain text.

    ``what``: the kind of the comment before it (test or file). ``comment``: the text of that comment.
    """

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
    """Return the blocks of all pages, in order."""
    found = ((page, m.groups(default="")) for page in PAGES for m in BLOCK.finditer(content(page)))
    return tuple(Block(page.relative_to(ROOT).as_posix(), *m) for page, m in found if m[2] in languages)


@cache
def files() -> dict[str, str]:
    """Return the files that pages show, by name. A name means the same file on every page."""
    shown = [(b.comment, b.text) for b in blocks("yaml", "python") if b.what == "file"]
    assert len(set(shown)) == len(dict(shown)), "pages show two files of one name"
    return dict(shown)


def write_files(folder: Path) -> None:
    for name, lines in files().items():
        (folder / name).write_text(lines)


def outputs() -> list[tuple[Path, str, str]]:
    """Return (page, output or run, command) for each output shown.

    An ``output`` is that of a command that starts no rank.
    """
    return [(page, m[2], m[3]) for page in PAGES for m in OUTPUT.finditer(content(page))]


def shell(script: str, cwd: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script as a user with the virtual environment active."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(["bash", "-euc", script], cwd=cwd, env=env, input=given, capture_output=True, text=True)


def answer(command: str, cwd: Path) -> tuple[int, str]:
    """Run a launcher command that starts no rank in this process, and return its exit code and output.

    Plans on our pages are those of a torch before 2.15, which keeps more memory.
    """
    words, _, after = command.partition(" | ")
    out = StringIO()
    older = patch("launcher.planner.plan_job.keeps_messages", return_value=True)
    with older, _user(cwd), redirect_stdout(out), redirect_stderr(out):
        code = main(shlex.split(words.removeprefix(LAUNCHER)))
    return code, shell(after, cwd, out.getvalue()).stdout if after else out.getvalue()


@contextmanager
def _user(folder: Path) -> Iterator[None]:
    """Make ``folder`` the current folder of Python; modules that are imported from it are forgotten afterwards."""
    before = set(sys.modules)
    invalidate_caches()
    with chdir(folder), patch.object(sys, "path", [str(folder), *sys.path]), patch.dict(os.environ, COLUMNS="120"):
        yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
