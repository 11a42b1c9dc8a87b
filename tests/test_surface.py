"""The frozen surface: what scripts call, what configurations set, and where each setting is documented."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

import launcher
from launcher.job import help
from launcher.job.config_folders import CONF
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.base import Settings
from launcher.job.schema.job import Job

GOLDEN = Path(__file__).parent / "golden/surface.txt"
AGAIN = "the surface changed: if that is meant, run: python -m tests.test_surface > tests/golden/surface.txt"
MODULES = ("launcher", "launcher.checkpoint", "launcher.parallel")


def keys(note: Any = Job, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of the schema; ``model[lm].dim`` exists if ``model`` is a language model."""
    kinds: dict[str, Any] = dict(schema_keys.kinds(note)) or {"": schema_keys.settings(note, None)}
    for tag, cls in kinds.items():
        if above == "steps":
            head = f"steps.{tag}."
        else:
            head = (above + (f"[{tag}]" if tag else "")).removesuffix(".") + ("." if above else "")
        for name, field in schema_keys.fields(cls).items() if cls else ():
            yield f"{head}{name}", field
            yield from keys(schema_keys.typed(field), f"{head}{name}")
    if above == "steps" and not schema_keys.kinds(note):
        yield from keys(schema_keys.below(note, "", {}), above)


def setting(key: str, field: FieldInfo) -> str:
    said = "required" if field.is_required() else json.dumps(field.get_default())
    words = schema_keys.literals(schema_keys.typed(field))
    return f"{key} = {said}" + (f"  ({' | '.join(map(str, words))})" if words else "")


def calls(module: str) -> Iterator[str]:
    home = importlib.import_module(module)
    for name in getattr(home, "__all__", ()):
        thing = getattr(home, name)
        plain = thing in (Job, launcher.Plan)
        spelled = str(inspect.signature(thing)) if inspect.isroutine(thing) or inspect.isclass(thing) else f" = {thing}"
        yield f"{module}.{name}" + ("" if plain else spelled)


def text() -> str:
    lines = [line for module in MODULES for line in calls(module)]
    plain = (k for k in keys() if not isinstance(k[1].get_default(), Settings))  # their own keys follow
    return "\n".join([*lines, "", *(setting(*k) for k in plain)]) + "\n"


def test_names_signatures_settings_and_defaults_are_those_of_the_golden_file() -> None:
    assert text() == GOLDEN.read_text(), AGAIN


def test_the_package_offers_the_documented_names_and_no_other() -> None:
    assert sorted(launcher.__all__) == ["Job", "Plan", "RequestError", "__version__", "plan_job", "run_job"]
    assert all(callable(getattr(launcher, name)) for name in launcher.__all__ if name != "__version__")


def documented() -> dict[str, str]:
    """Return each key of the files below ``conf``, with the comment beside it.

    Options of a group are read together, and files that others build on first. The keys of ``operators`` are names of
    modules, not settings.
    """
    found: dict[str, str] = {}
    files = [p for p in CONF.rglob("*.yaml") if p.parent.name != "operators"]
    for path in sorted(files, key=lambda p: ("defaults:" in p.read_text(), p)):
        for setting in help.settings(path, "" if path.parent == CONF else path.parent.name):
            found.setdefault(setting.key, setting.comment)
    return {key: said for key, said in found.items() if not key.startswith("operators.")}  # names of modules


GROUPS = {
    "model",
    "data",
    "loss",
    "optim",
    "schedule",
    "launch",
    "cluster",
    "debug",
    "recipe",
}  # set by choosing an option


def settable() -> set[str]:
    """Return keys as a user writes them, without the arguments of a user's own class."""
    return {re.sub(r"\[\w+\]", "", key) for key, _ in keys() if "[_target_]" not in key} - GROUPS


def test_conf_has_no_key_that_the_schema_lacks() -> None:
    verbs = {key for key in documented() if re.fullmatch(r"steps\.\w+", key)}
    assert documented().keys() - settable() - verbs == set()


def test_every_setting_is_in_conf_or_in_the_comment_of_the_null_it_takes_the_place_of() -> None:
    known = documented()
    hidden = {key: known.get(key.rpartition(".")[0], "") for key in settable() - known.keys()}
    assert [key for key, comment in hidden.items() if key.rpartition(".")[2] not in comment] == []


def test_every_setting_in_conf_has_a_comment_beside_it() -> None:
    known = documented()
    above = {
        key.rpartition(".")[0] for key in known
    }  # keys of a section have their own comments; an option has the comment of its file
    assert [k for k, comment in known.items() if not comment and k not in above and not k.endswith(".name")] == []


if __name__ == "__main__":
    print(text(), end="")
