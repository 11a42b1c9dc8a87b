"""An encryption key under misspelled names and in wrong forms, typed and in files: it is never printed."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
from pathlib import Path

from launcher.__main__ import main
from tests.drills import Tally
from tests.run.secret_words import FILES, FORMS, KEYS, NAMES, typed

TIMES = 1500
BASE = "defaults: [lm_single, _self_]\n"


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    ways = [*itertools.product(FORMS + FILES, NAMES, KEYS.values())]
    for form, name, key in chance.choices(ways, k=times):
        said = _file(folder, form.format(name=name, key=key)) if form in FILES else _line(typed(form, name, key))
        seen = [line for line in said.lower().splitlines() if key.lower() in line]
        tally.note("shown" if seen else "right", f"{form!r}: {seen[0]}" if seen else "")
    return tally


def _file(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(BASE + text)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return _answer(["recipe=mine.yaml"])
    finally:
        os.chdir(before)


def _line(ways: list[list[str]]) -> str:
    return "\n".join(map(_answer, ways))


def _answer(words: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(["show=config", *words])
    return said.getvalue()
