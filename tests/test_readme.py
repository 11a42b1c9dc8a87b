"""The README is true: its commands run, its output is the real one, its tables are those of the schema."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema import schema_keys
from launcher.job.schema.base import Settings
from launcher.job.schema.job import Job
from launcher.job.yaml.config_search import Shelf
from launcher.plan.plan import ask
from launcher.plan.settings import mode
from tests.test_imports import trees
from tests.test_surface import documented, keys

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
AGAIN = "the README is behind: python -m tests.test_readme writes its tables and its output anew"
BLOCK = re.compile(r"(?:<!-- (test|file): ([^\n]*) -->\n)?```(sh|python|yaml)\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"(<!-- output: ([^\n]*) -->\n```text\n).*?(```)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
VERDICT = re.compile(r"^certify: holds: .*$", re.MULTILINE)
ERROR = re.compile(r"(?<=largest error )\S+(?=, allowed)")
SPECIAL = re.compile(r"(?<!\w)_|[<*|]")  # what Markdown would take for its own

# A value other than the default, where the schema cannot tell one.
SAMPLES: dict[str, Any] = {
    "parallel.pipeline.seq_chunks": 2,
    "parallel.comm_fusion.allreduce": {"mode": "size", "config": 32},
    "parallel.comm_fusion.allgather": {"mode": "size", "config": 32},
    "parallel.comm_fusion.reducescatter": {"mode": "size", "config": 32},
    "parallel.operators": {"layers.*": {"in": [[1, 2], [2, 1]]}},
    "parallel.grid.tp": 2,
    "parallel.local_norm.dump": "norms",
    "parallel.shared": [["embed.weight", "head.weight"]],
    "parallel.param_strategy.save": "params.json",
    "parallel.param_strategy.load": "params.json",
    "parallel.operator_strategy.save": "/operators.json",
    "parallel.operator_strategy.load": "/operators.json",
    "parallel.group_file": "groups.json",
    "parallel.transformer_opt": "parallel_speed_up.json",
    "checkpoint.encrypt": "env:CHECKPOINT_KEY",
}


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a user with the virtual environment active, in an empty folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(["bash", "-euc", script], cwd=cwd, env=env, capture_output=True, text=True)


def blocks(*kinds: str) -> list[tuple[str, str, str, str]]:
    """(what the comment before it is, the comment, language, text) of each block that is not plain text."""
    found = [m.groups(default="") for m in BLOCK.finditer(README.read_text(encoding="utf-8"))]
    return [(a, b, c, d) for a, b, c, d in found if c in kinds]


def fast(script: str, comment: str) -> str:
    """``a -> b | c -> d``: fewer steps than a reader would take. Each must be there to be replaced."""
    for old, new in (pair.split(" -> ") for pair in comment.split(" | ") if pair):
        assert old in script
        script = script.replace(old, new)
    return script


COMMANDS = {text.partition("\n")[0]: (comment, text) for _, comment, _, text in blocks("sh") if comment != "dry run"}


def write_files(folder: Path) -> None:
    """The files that the README shows."""
    for what, name, language, text in blocks("yaml", "python"):
        assert what == "file" or language == "python"
        if what == "file":
            (folder / name).write_text(text)


@pytest.mark.parametrize(("comment", "script"), COMMANDS.values(), ids=list(COMMANDS))
def test_every_command_runs(comment: str, script: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    done = shell(fast(script, comment), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_commands_at_the_top_are_what_make_knows() -> None:
    ((_, _, _, script),) = [b for b in blocks("sh") if b[1] == "dry run"]
    demo, test = script.splitlines()
    assert (demo.split()[:2], test.split()[:2]) == (["make", "demo"], ["make", "test"])
    dry = "make --dry-run JOBS=3"
    lines = {what: shell(f"{dry} -C {ROOT} {what}", ROOT).stdout.splitlines() for what in ("demo", "test")}
    assert ".venv/bin/python -m launcher" in lines["demo"]
    assert ".venv/bin/python -m pytest -n 3 --dist loadfile" in lines["test"]


@pytest.mark.parametrize("script", [text for what, *_, text in blocks("python") if what != "file"])
def test_every_script_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    done = shell("python script.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 ranks\n")


def output(command: str, cwd: Path) -> str:
    write_files(cwd)
    done = shell(command, cwd)
    assert done.returncode in (0, 2), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", [m[2] for m in OUTPUT.finditer(README.read_text(encoding="utf-8"))])
def test_the_output_shown_is_the_real_one(command: str, tmp_path: Path) -> None:
    (shown,) = (m[0] for m in OUTPUT.finditer(README.read_text(encoding="utf-8")) if m[2] == command)
    assert shown == f"<!-- output: {command} -->\n```text\n{output(command, tmp_path)}```", AGAIN


def recipes() -> Iterator[str]:
    yield from ("| recipe | what it shows |", "|---|---|")
    for name in Shelf().options("recipe"):
        yield f"| `{name}` | {opening(f'recipe/{name}')} |"


def options() -> Iterator[str]:
    yield from ("| option | what it is |", "|---|---|")
    for group in Shelf().groups():
        for name in Shelf().options(group) if group != "recipe" else ():
            said = f"steps=[{name}]" if group == "steps" else f"{group}={name}"
            yield f"| `{said}` | {opening(f'{group}/{name}')} |"


def opening(config: str) -> str:
    path = Shelf().file(config)
    assert path is not None
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    return (second if first.startswith("# @package") else first).removeprefix("# ")  # Hydra wants its own line first


def settable() -> Iterator[tuple[str, str, str]]:
    """Key, default and comment of each setting that is there whatever the options are, and of each step's own."""
    said = documented()
    for key, field in keys():
        section = isinstance(field.get_default(), Settings)
        if "[" not in key and key in said and said[key] and not section and not key.endswith(".kind"):
            yield key, "" if field.is_required() else json.dumps(field.get_default()), said[key]


def rows() -> Iterator[str]:
    yield from ("| setting | default | what it does | today |", "|---|---|---|---|")
    refused = unavailable()
    for key, default, comment in settable():
        shown = f"`{default}`" if default else "required"
        text = SPECIAL.sub(lambda m: "\\" + m[0], comment)
        yield f"| `{key}` | {shown} | {text} | {refused.get(key, 'yes')} |"


def others(key: str) -> Iterator[Any]:
    """Values of a setting other than its default."""
    field = dict(keys())[key]
    default = field.get_default()
    yield from (word for word in schema_keys.literals(schema_keys.typed(field)) if word != default)
    yield from (not default,) if isinstance(default, bool) else ()
    yield from (SAMPLES[key],) if key in SAMPLES else ()


def unavailable() -> dict[str, str]:
    """What the planner refuses today, by asking it."""
    base = compose([]).data
    found = {}
    for key, _, _ in settable():
        tried = list(others(key))
        refused = [value for value in tried if later(base, key, value)]
        if refused and len(refused) == len(tried):
            found[key] = "not yet"
        elif refused:
            found[key] = f"not yet: {', '.join(map(str, refused))}"
    return found


def later(base: dict[str, Any], key: str, value: Any) -> bool:
    """Whether a request that is right but for this value is told that it is not available yet."""
    data = copy.deepcopy(base)
    node = data
    *parts, last = key.split(".")
    for part in parts:
        node = node.setdefault(part, {})
    node[last] = value
    try:
        ask(Job.model_validate(data))
    except RequestError as error:
        return any(mode.LATER in p.text for p in error.problems)
    return False


@pytest.mark.parametrize("name", [name for what, name, *_ in blocks("python") if what == "file"])
def test_every_module_shown_is_in_the_style_of_ours(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        done = subprocess.run(
            [*ruff, *words, "--config", ROOT / "pyproject.toml", tmp_path / name], capture_output=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_verdict_shown_is_the_real_one(tmp_path: Path) -> None:
    """But for the errors themselves, whose last digits are those of a processor."""
    write_files(tmp_path)
    ((shown,),) = ((m[0],) for m in VERDICT.finditer(README.read_text(encoding="utf-8")))
    done = shell("python -m launcher recipe=own.yaml 'steps=[certify]'", tmp_path)
    (said,) = (m[0] for m in VERDICT.finditer(done.stdout))
    assert ERROR.sub("E", said) == ERROR.sub("E", shown)


def fresh(text: str, cwd: Path) -> str:
    tables = {"recipes": recipes, "options": options, "settings": rows}
    text = TABLE.sub(lambda m: m[1] + "\n".join(tables[m[2]]()) + "\n" + m[3], text)
    return OUTPUT.sub(lambda m: m[1] + output(m[2], cwd) + m[3], text)


@pytest.mark.parametrize("name", ["recipes", "options", "settings"])
def test_the_tables_are_those_of_the_schema(name: str) -> None:
    (shown,) = (m[0] for m in TABLE.finditer(README.read_text(encoding="utf-8")) if m[2] == name)
    made = {"recipes": recipes, "options": options, "settings": rows}[name]
    assert shown == f"<!-- table: {name} -->\n" + "\n".join(made()) + "\n<!-- end -->", AGAIN


def test_whatever_the_planner_refuses_for_now_is_in_the_table() -> None:
    """A section that refuses what is not available yet says so with ``LATER``, of its ``KEY`` or one below."""
    texts = [path.read_text(encoding="utf-8") for path in Path(mode.__file__).parent.glob("*.py")]
    refused = [key for text in texts if "LATER" in text for key in re.findall('^KEY = "(.*)"$', text, re.MULTILINE)]
    found = unavailable()
    assert refused
    assert [key for key in refused if not any(known.startswith(key) for known in found)] == []


def test_no_setting_is_accepted_and_then_ignored() -> None:
    schema = [f"launcher.job.{name}" for name in ("schema", "models", "parallel", "steps")]
    read = {
        n.attr for m, tree in trees().items() if m not in schema for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    refused = {key for key, why in unavailable().items() if why == "not yet"}
    lone = {name: key for key, _, _ in settable() if key not in refused for name in [key.rpartition(".")[2]]}
    renamed = {"async": "asynchronous"}
    assert [key for name, key in lone.items() if renamed.get(name, name) not in read] == []


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        README.write_text(fresh(README.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
