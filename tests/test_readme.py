"""README.md and docs/ are true: their commands run, their output is real, and their tables are those of the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest

from launcher.job.config_folders import ConfigFiles
from launcher.job.schema.base import Settings
from launcher.job.schema.debug import Drill
from tests.pages import (
    DRY,
    LAUNCHER,
    OUTPUT,
    PAGES,
    ROOT,
    TABLE,
    Block,
    answer,
    blocks,
    content,
    files,
    outputs,
    shell,
    write_files,
)
from tests.test_docs import folders, layers
from tests.test_imports import trees
from tests.test_surface import documented, keys

AGAIN = "a page is behind: python -m tests.test_readme writes their tables and their output anew"
ERROR = re.compile(r"(?<=largest error )\S+(?=, allowed)|(?<=errors up to )\S+|(?<=gradient norm \()\S+(?=\))")
PRINTED = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
SPECIAL = re.compile(r"(?<!\w)_|[<*|]")  # characters that Markdown would interpret


def fast(script: str, comment: str) -> str:
    """Replace ``a -> b | c -> d``, for example to run fewer steps; each text must exist in the script."""
    for old, new in (pair.split(" -> ") for pair in comment.split(" | ") if pair):
        assert old in script
        script = script.replace(old, new)
    return script


def commands() -> dict[str, Block]:
    """Return the blocks of commands, each once even if several pages show it."""
    return {b.text: b for b in reversed(blocks("sh")) if b.comment != DRY}


SHOWN = {command for _, _, command in outputs()}  # these have their own test


@pytest.mark.parametrize("block", commands().values(), ids=lambda b: b.name)
def test_every_command_runs(block: Block, tmp_path: Path) -> None:
    """Commands run one after the other in one folder; those that start no rank run in this process."""
    write_files(tmp_path)
    tried = fast("\n".join(line for line in block.text.splitlines() if line not in SHOWN), block.comment)
    for line in tried.splitlines():
        if line.startswith(LAUNCHER) and " show=" in line:
            code, words = answer(line, tmp_path)
            assert code == 0, words
        else:
            done = shell(line, tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_commands_at_the_top_are_what_make_knows() -> None:
    (script,) = (b.text for b in blocks("sh") if b.comment == DRY and b.page == "README.md")
    demo, test = script.splitlines()
    assert (demo.split()[:2], test.split()[:2]) == (["make", "demo"], ["make", "test"])
    dry = "make --dry-run JOBS=3"
    lines = {what: shell(f"{dry} -C {ROOT} {what}", ROOT).stdout.splitlines() for what in ("demo", "test")}
    assert ".venv/bin/python -m launcher" in lines["demo"]
    assert "TESTS=quick .venv/bin/python -m pytest -n 3 --dist loadfile" in lines["test"]


@pytest.mark.parametrize("block", [b for b in blocks("python") if b.what != "file"], ids=lambda b: b.name)
def test_every_script_runs(block: Block, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "script.py").write_text(fast(block.text, block.comment))
    done = shell("python script.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert PRINTED.findall(block.text) == done.stdout.splitlines()[: len(PRINTED.findall(block.text))]


def output(kind: str, command: str, cwd: Path) -> str:
    write_files(cwd)
    if kind == "output":
        code, words = answer(command, cwd)
        assert code in (0, 2), words
        return words
    done = shell(command, cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "kind", "command"), outputs(), ids=lambda x: str(x) if isinstance(x, str) else x.name)
def test_the_output_shown_is_the_real_one(page: Path, kind: str, command: str, tmp_path: Path) -> None:
    """Rounding errors may differ, because their last digits depend on the processor."""
    (shown,) = (m[0] for m in OUTPUT.finditer(content(page)) if m[3] == command)
    real = f"<!-- {kind}: {command} -->\n```text\n{output(kind, command, tmp_path)}```"
    assert ERROR.sub("E", shown) == ERROR.sub("E", real), AGAIN


def recipes() -> Iterator[str]:
    yield from ("| recipe | what it shows |", "|---|---|")
    for name in ConfigFiles().options("recipe"):
        yield f"| `{name}` | {ConfigFiles().title(f'recipe/{name}')} |"


def options() -> Iterator[str]:
    yield from ("| option | what it is |", "|---|---|")
    for group in ConfigFiles().groups():
        for name in ConfigFiles().options(group) if group != "recipe" else ():
            said = f"steps=[{name}]" if group == "steps" else f"{group}={name}"
            yield f"| `{said}` | {ConfigFiles().title(f'{group}/{name}')} |"


def settable() -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of each setting that exists for all options, and of each step's own settings."""
    said = documented()
    for key, field in keys():
        section = isinstance(field.get_default(), Settings)
        if "[" not in key and key in said and said[key] and not section and not key.endswith(".kind"):
            yield key, "" if field.is_required() else json.dumps(field.get_default()), said[key]


def rows() -> Iterator[str]:
    yield from ("| setting | default | what it does |", "|---|---|---|")
    for key, default, comment in settable():
        shown = f"`{default}`" if default else "required"
        text = SPECIAL.sub(lambda m: "\\" + m[0], comment)
        yield f"| `{key}` | {shown} | {text} |"


def drills() -> Iterator[str]:
    yield from ("| `debug.drill` | what happens |", "|---|---|")
    for kind, field in Drill.model_fields.items():
        inner = next(t for t in get_args(field.annotation) if t is not type(None))
        yield f"| `{kind}: {{{', '.join(inner.model_fields)}}}` | {field.description} |"


@pytest.mark.parametrize("name", [name for name in files() if name.endswith(".py")])
def test_every_module_shown_is_in_the_style_of_ours(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        done = subprocess.run(
            [*ruff, *words, "--config", ROOT / "pyproject.toml", tmp_path / name], capture_output=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "recipes": recipes, "options": options, "settings": rows, "layers": layers, "folders": folders,
    "drills": drills,
}  # fmt: skip


def fresh(page: Path, cwd: Path) -> str:
    """Return the page with its tables and outputs made again."""
    said_now = TABLE.sub(lambda m: m[1] + "\n".join(TABLES[m[2]]()) + "\n" + m[3], content(page))
    return OUTPUT.sub(lambda m: m[1] + output(m[2], m[3], cwd) + m[4], said_now)


SHOWN_TABLES = [(page, m[2]) for page in PAGES for m in TABLE.finditer(content(page))]


@pytest.mark.parametrize(("page", "name"), SHOWN_TABLES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_the_tables_are_those_of_the_code(page: Path, name: str) -> None:
    (shown,) = (m[0] for m in TABLE.finditer(content(page)) if m[2] == name)
    assert shown == f"<!-- table: {name} -->\n" + "\n".join(TABLES[name]()) + "\n<!-- end -->", AGAIN


def test_every_table_is_on_a_page() -> None:
    assert {name for _, name in SHOWN_TABLES} == set(TABLES)


def test_no_setting_is_accepted_and_then_ignored() -> None:
    schema = [f"launcher.job.{name}" for name in ("schema", "models", "parallel", "steps")]
    read = {
        n.attr for m, tree in trees().items() if m not in schema for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    lone = {key.rpartition(".")[2]: key for key, _, _ in settable()}
    renamed = {"async": "asynchronous"}
    assert [key for name, key in lone.items() if renamed.get(name, name) not in read] == []


if __name__ == "__main__":
    for behind in PAGES:
        with TemporaryDirectory() as folder:
            behind.write_text(fresh(behind, Path(folder)), encoding="utf-8")
