"""The results of the zoo as text: a grid, the reasons of the refusals, the failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tests.parity.zoo.case import all_cases
from tests.parity.zoo.cell import Verdict
from tests.parity.zoo.layouts import LAYOUTS
from tests.parity.zoo.table import Results, counts, failing

REASON = re.compile(r'(\d+)\. <a id="\d+"></a>`(.*)`')


def grid(found: Results, layouts: Sequence[str]) -> str:
    """A grid with a row per model."""
    wide = max(map(len, found), default=0)
    lines = [" " * wide + "  " + "  ".join(layouts)]
    for name, row in found.items():
        cells = (f"{row[n].kind if n in row else '':{len(n)}}" for n in layouts)
        lines.append(f"{name:{wide}}  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def summary(found: Results) -> str:
    said = ", ".join(f"{n} {kind}" for kind, n in counts(found).items())
    return f"{len(found)} models, {sum(map(len, found.values()))} cells: {said}"


def refusals(found: Results) -> str:
    lines = []
    for name, row in found.items():
        for text, layouts in _reasons(row).items():
            lines.append(f"{name} ({', '.join(layouts)}): {text}")
    return "\n".join(lines)


def failures(found: Results) -> str:
    """The failures, and the refusals without a way out."""
    wrong = [f"- {name}, {layout}: {v.kind}: {_short(v.text)}" for name, layout, v in failing(found)]
    said = {
        _short(v.text): name for name, row in found.items() for v in row.values() if v.kind == "refused" and not v.helps
    }
    bare = [f"- {name}: refused without a way out: {text}" for text, name in said.items()]
    return "\n".join([summary(found), "", *wrong, "", *bare, ""])


def page(found: Results) -> str:
    """The text of ``docs/zoo.md``, from the results of every model."""
    return _page(found, _about(found))


def _page(found: Results, about: Mapping[str, str]) -> str:
    notes, rows = dict[str, int](), []
    for name, row in found.items():
        cells = []
        for layout in LAYOUTS:
            verdict = row[layout]
            if verdict.kind == "refused":
                number = notes.setdefault(_short(verdict.text), len(notes) + 1)
                cells.append(f"refused [{number}](#{number})")
            else:
                cells.append(verdict.kind)
        rows.append(f"| `{name}`: {about[name]} | {' | '.join(cells)} |")
    reasons = [f'{n}. <a id="{n}"></a>`{text}`' for text, n in notes.items()]
    head = [
        "# Odd models",
        "",
        "Written by `make test-zoo`. Each model is trained three steps in fp64 under each layout, and compared with",
        "plain torch in one process: losses, norms, every gradient, weights and buffers to 1e-12 (*exact*).",
        "What cannot be exact is *refused* by the plan, before anything starts, for the reason below.",
        "",
        f"{summary(found)}.",
        "",
        f"| model | {' | '.join(LAYOUTS)} |",
        f"|---|{'---|' * len(LAYOUTS)}",
    ]
    return "\n".join([*head, *rows, "", "## Why refused", "", *reasons, ""])


def updated(text: str, found: Results) -> str:
    """The text of ``docs/zoo.md``, in which the rows of ``found`` are new and all others stay."""
    before, about = _read(text)
    names = [*before, *(name for name in found if name not in before)]
    return _page({name: found.get(name, before.get(name, {})) for name in names}, about | _about(found))


def _about(names: Iterable[str]) -> dict[str, str]:
    cases = all_cases()
    return {name: cases[name].about for name in names}


def _read(text: str) -> tuple[Results, dict[str, str]]:
    """The results in the text of ``docs/zoo.md``, and what it says about each model."""
    lines = text.splitlines()
    reasons = dict(match.groups() for line in lines if (match := REASON.fullmatch(line)))
    found: Results = {}
    about = {}
    for line in lines:
        if line.startswith("| `"):
            head, *cells = line[2:-2].rsplit(" | ", len(LAYOUTS))
            name, _, about_it = head[1:].partition("`: ")
            verdicts = [
                Verdict(cell.partition(" ")[0], reasons.get(cell.rpartition("#")[2][:-1], "")) for cell in cells
            ]
            found[name] = dict(zip(LAYOUTS, verdicts, strict=True))
            about[name] = about_it
    return found, about


def _reasons(row: dict[str, object]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for layout, verdict in row.items():
        if verdict.kind == "refused":  # type: ignore[attr-defined]
            out.setdefault(_short(verdict.text), []).append(layout)  # type: ignore[attr-defined]
    return out


def _short(text: str) -> str:
    """The text on one line."""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[:600]
