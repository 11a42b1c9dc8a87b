"""The results of the zoo as text: a grid, the reasons of the refusals, the failures."""

from __future__ import annotations

from collections.abc import Sequence

from tests.parity.zoo.case import all_cases
from tests.parity.zoo.table import Results, counts, failing


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


def page(found: Results, layouts: Sequence[str]) -> str:
    """The text of ``docs/zoo.md``."""
    about, notes, rows = all_cases(), dict[str, int](), []
    for name, row in found.items():
        cells = []
        for layout in layouts:
            verdict = row[layout]
            if verdict.kind == "refused":
                number = notes.setdefault(_short(verdict.text), len(notes) + 1)
                cells.append(f"refused [{number}](#{number})")
            else:
                cells.append(verdict.kind)
        rows.append(f"| `{name}`: {about[name].about} | {' | '.join(cells)} |")
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
        f"| model | {' | '.join(layouts)} |",
        f"|---|{'---|' * len(layouts)}",
    ]
    return "\n".join([*head, *rows, "", "## Why refused", "", *reasons, ""])


def _reasons(row: dict[str, object]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for layout, verdict in row.items():
        if verdict.kind == "refused":  # type: ignore[attr-defined]
            out.setdefault(_short(verdict.text), []).append(layout)  # type: ignore[attr-defined]
    return out


def _short(text: str) -> str:
    """The text on one line."""
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[:600]
