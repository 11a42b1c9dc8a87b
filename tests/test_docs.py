"""docs/ names what exists: files, links that lead somewhere, and the layers of the import test."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.plan.schedule.schedules import RULES
from tests.pages import GENERATED, PAGES, ROOT, content
from tests.parity.zoo.layouts import LAYOUTS
from tests.test_imports import DISTRIBUTED, FILES, HYDRA, LAYERS, MAY_IMPORT, MUST_NOT_TOUCH, TORCH, files

NAMED = re.compile(r"(?<![\w./-])((?:launcher|tests|conf|recipes|docs|benchmarks)/[\w./*-]+|Makefile|pyproject\.toml)")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
TARGET = re.compile(r"(?<=`)make ([a-z][a-z-]*)")
ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
TERM = re.compile(r"^\*\*([^*]+)\*\*", re.MULTILINE)
TYPE = re.compile(r"^\| `(\w+)` \| `([\w./]+)` \|", re.MULTILINE)
NAMED_TYPE = re.compile(r"(?<=`)([A-Z]\w*[a-z]\w*)(?=(?:\.\w+)?`)")
OTHERS = {
    "DataLoader", "Dataset", "DistributedDataParallel", "GradScaler", "ImageFolder", "IterableDataset", "Literal",
    "ModuleList", "KillWait", "None", "Python", "True", "False",
}  # fmt: skip
BANS = {"torch": TORCH, "torch.distributed": DISTRIBUTED, "Hydra": HYDRA, "files": FILES, "environment": ("os",)}
WHERE, GLOSSARY = ROOT / "docs/where.md", ROOT / "docs/glossary.md"


def layers() -> Iterator[str]:
    """Yield the layer table of ``tests/test_imports.py``."""
    yield from ("| layer | what is in it | may import | must not touch |", "|---|---|---|---|")
    for layer, allowed in MAY_IMPORT.items():
        homes = ", ".join(f"`{prefix}`" for prefix, name in LAYERS.items() if name == layer)
        below = ", ".join(name for name in MAY_IMPORT if name in allowed) or "nothing"
        banned = [word for word, names in BANS.items() if set(names) <= {*MUST_NOT_TOUCH[layer]}]
        yield f"| {layer} | {homes} | {below} | {', '.join(banned)} |"


def folders() -> Iterator[str]:
    """Yield a row for each folder of the package, with the first paragraph of its ``__init__``."""
    yield from ("| folder | what it is for |", "|---|---|")
    for path in sorted(p for p in files().values() if p.name == "__init__.py"):
        opening = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
        yield f"| `{path.parent.relative_to(ROOT)}/` | {' '.join(opening.split()).replace('``', '`')} |"


def test_every_folder_says_what_it_is_for() -> None:
    assert [row for row in folders() if row.endswith("|  |")] == []


COMMANDS = {
    *(
        "Add",
        "Attribute",
        "Build",
        "Compare",
        "Describe",
        "Finish",
        "Give",
        "Make",
        "Number",
        "Pass",
        "Refuse",
        "Return",
    ),
    *("Run", "Set", "Yield"),
}


def test_docstrings_of_functions_say_what_the_function_does() -> None:
    """They begin with ``Returns`` and not with ``Return``: one mood in the package."""
    functions = (
        (path, node)
        for path in files().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    first = ((f"{path.relative_to(ROOT)}: {f.name}", (ast.get_docstring(f) or "").split()[:1]) for path, f in functions)
    assert [place for place, word in first if COMMANDS.intersection(word)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = {name.rstrip(".") for name in NAMED.findall(content(page))}
    assert [name for name in sorted(named) if not any(ROOT.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = {link.partition("#")[0] for link in LINK.findall(content(page)) if "://" not in link}
    assert [t for t in sorted(targets) if t and not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    links = [link.partition("#") for link in LINK.findall(content(page)) if "://" not in link and "#" in link]
    assert [f"{to}#{at}" for to, _, at in links if at not in anchors(page.parent / to if to else page)] == []


def anchors(page: Path) -> set[str]:
    """Return the headings of a page in the form that links use."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", content(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_table_has_a_place_that_was_left_to_be_filled() -> None:
    rows = [(p.name, line) for p in PAGES for line in content(p).splitlines() if line.startswith("|")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\| (@@|TODO|TBD|\?+) \|", row[1])] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set[Path](), [PAGES[0]]
    while left:
        page = left.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = (link.partition("#")[0] for link in LINK.findall(content(page)) if "://" not in link)
            left += [(page.parent / link).resolve() for link in links if link]
    assert {*PAGES, GENERATED} - reached == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_make_target_that_a_page_names_is_there(page: Path) -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(content(page))) - there == set()


def test_where_to_change_what_has_forty_rows_and_each_names_a_file() -> None:
    rows = [row for row in ROW.findall(content(WHERE)) if "---" not in row[0]]
    assert len(rows) >= 40
    assert [what for what, where in rows if where != "where" and not NAMED.search(where)] == []
    assert len({what for what, _ in rows if what != "I want to change"}) == len([r for r in rows if r[1] != "where"])


def test_the_glossary_is_in_order_and_has_each_word_once() -> None:
    words = [word.lower() for word in TERM.findall(content(GLOSSARY))]
    assert [(a, b) for a, b in pairwise(words) if a >= b] == []


def classes() -> dict[str, set[str]]:
    """The files of each class and type alias of the package."""
    homes: dict[str, set[str]] = {}
    for path in files().values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper():
                    homes.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return homes


def test_every_type_of_the_glossary_is_in_its_file() -> None:
    homes, rows = classes(), TYPE.findall(content(GLOSSARY))
    assert [name for name, _ in rows] == sorted({name for name, _ in rows})
    assert [row for row in rows if row[1] not in homes.get(row[0], ())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_type_that_a_page_names_is_in_the_glossary(page: Path) -> None:
    """A type may also be another program's. A page that names a renamed type is out of date."""
    known = {name for name, _ in TYPE.findall(content(GLOSSARY))}
    prose = re.sub(r"```.*?```", "", content(page), flags=re.DOTALL)
    assert set(NAMED_TYPE.findall(prose)) - known - OTHERS == set()


def test_every_optional_part_and_every_extra_has_a_row() -> None:
    parts = {p.parent.name for p in (ROOT / "launcher/extras").glob("*/__init__.py")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", content(ROOT / "docs/extras.md"), re.MULTILINE)
    assert sorted(rows) == sorted([*parts, *extras])


def test_the_newest_release_of_the_changelog_is_the_version_of_the_package() -> None:
    unreleased, newest, *_ = re.findall(r"^## \[([^\]]+)\]", content(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert (unreleased, newest) == ("Unreleased", launcher.__version__)


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    check = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    assert [h["entry"] for h in hooks] == [
        line.strip().replace("$(BIN)", ".venv/bin") for line in check.splitlines()[1:]
    ]


def test_pages_agree_on_the_number_of_odd_models_and_layouts() -> None:
    [(models, cells)] = re.findall(r"^(\d+) models, (\d+) cells", content(GENERATED), re.MULTILINE)
    text = " ".join(" ".join(map(content, PAGES)).split())
    assert {*re.findall(r"(\d+) odd models under (\d+) layouts", text)} == {(models, str(len(LAYOUTS)))}
    assert {*re.findall(r"(\d+) odd models", text)} == {models}
    assert int(cells) == int(models) * len(LAYOUTS)


def test_the_readme_has_the_mean_errors_of_the_predictions() -> None:
    report = content(ROOT / "benchmarks/predict.md")
    rows = dict(re.findall(r"^\| (\w+) \| \d+ \| ([\d.]+)% \|", report, re.MULTILINE))
    named = ("dgxc", "megatron_h100", "vtrain_single", "vtrain_multi", "ultrascale")
    [bullet] = re.findall(r"^- Predicted seconds .*?(?=^- )", content(PAGES[0]), re.MULTILINE | re.DOTALL)
    assert re.findall(r"([\d.]+) %", bullet)[: len(named)] == [rows[name] for name in named]


def test_no_page_has_another_time_for_a_make_target_than_contributing() -> None:
    times = r"\b(?:minutes|half an hour|quarters? of an hour|an hour)\b"
    opening = (ROOT / "Makefile").read_text().partition("\n\n")[0]
    assert re.findall(times, opening) == []


def test_every_scheduler_has_a_row() -> None:
    table = content(ROOT / "docs/settings.md").partition("\n## Schedulers\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*RULES, "auto"]
