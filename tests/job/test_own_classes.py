"""Every setting accepts exactly those classes of the launcher that docs/security.md lists for it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import launcher
from launcher.__main__ import main
from launcher.data.torch_datasets.open import UserData
from launcher.errors import RequestError
from launcher.job.targets import BASES, OURS, build, check, locate, refusal

ROOT = Path(__file__).parents[2]
TYPES: dict[str, type] = {
    "Module": nn.Module,
    "UserData": UserData,
    "Optimizer": torch.optim.Optimizer,
    "Callable": Callable,  # type: ignore[dict-item]
    "object": object,
}


def classes() -> dict[str, type]:
    """Return the classes by every dotted path that leads to one, also through a module that imports it."""
    found = {}
    for info in pkgutil.walk_packages(launcher.__path__, "launcher."):
        if info.name.rpartition(".")[2] == "__main__" or ".starter.project" in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, one in inspect.getmembers(module, inspect.isclass):
            found[f"{info.name}.{name}"] = one
    return found


CLASSES = classes()
HOMES = sorted({f"{c.__module__}.{c.__qualname__}" for c in CLASSES.values() if c.__module__.startswith("launcher.")})


def documented() -> dict[str, set[str]]:
    table = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    return {setting: set(re.findall(r"`(launcher[\w.]+)`", listed)) for setting, listed in table if setting in BASES}


def test_the_tests_read_hundreds_of_classes():
    assert len(HOMES) > 700


def test_the_page_lists_what_each_setting_may_name():
    assert documented() == {setting: set(OURS[base]) for setting, base in BASES.items()}
    assert set(OURS) == set(BASES.values()) == set(TYPES)


class Host(nn.Module):
    """Takes arguments of every kind of type, and one without a type."""

    def __init__(
        self,
        bare: Any = None,
        module: nn.Module | None = None,
        modules: Sequence[nn.Module] = (),
        by_name: Mapping[str, nn.Module] | None = None,
        data: UserData | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        act: Callable[[int], int] | None = None,
        path: Path | None = None,
        text: str = "",
        *rest: nn.Module,
        **more: nn.Linear,
    ) -> None:
        super().__init__()
        self.built = (bare, module, modules, by_name, data, optimizer, act, path, text, rest, more)


ARGUMENTS: dict[str, str | None] = {
    "bare": None,  # of the same kind as the setting
    "module": "Module",
    "modules": "Module",
    "by_name": "Module",
    "data": "UserData",
    "optimizer": "Optimizer",
    "act": "Callable",
    "path": "",
    "text": "",
    "more": "",
}


def taken(target: object, base: type, allow: tuple[str, ...] = ()) -> bool:
    """Whether a setting accepts the class: the class is looked up, or even built.

    A class that is refused only for its arguments counts as accepted.
    """
    try:
        check(target, allow, base)  # type: ignore[arg-type]
    except RequestError as error:
        return "its arguments do not fit" in str(error)
    return True


@pytest.mark.parametrize("setting", BASES)
def test_a_setting_takes_what_the_page_lists(setting):
    base = TYPES[BASES[setting]]
    assert {path for path in CLASSES if taken({"_target_": path}, base)} == documented()[setting]


@pytest.mark.parametrize("setting", BASES)
def test_a_class_that_another_package_has_imported_is_no_way_around(setting, monkeypatch):
    front = types.ModuleType("front_of_all")
    for i, home in enumerate(HOMES):
        module, _, name = home.rpartition(".")
        one = getattr(sys.modules.get(module), name, None)  # None for classes inside of classes and functions
        if one is not None:
            setattr(front, f"Class{i}", one)
    monkeypatch.setitem(sys.modules, "front_of_all", front)
    base = TYPES[BASES[setting]]
    found = {
        HOMES[i] for i in range(len(HOMES)) if taken({"_target_": f"front_of_all.Class{i}"}, base, ("front_of_all",))
    }
    assert found == documented()[setting]


@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("setting", ["model", "callbacks", "loss"])
def test_an_argument_takes_what_its_type_lists(setting, argument):
    base = TYPES[BASES[setting]]
    kind = ARGUMENTS[argument]
    expected = set(OURS[BASES[setting] if kind is None else kind]) if kind != "" else set()
    host = f"{__name__}.Host"

    def found(paths: Sequence[str], wrap: Callable[[object], object]) -> set[str]:
        return {p for p in paths if taken({"_target_": host, argument: wrap({"_target_": p})}, base, ("tests",))}

    # every class as it is, some of them in lists, in mappings and in arguments of arguments
    assert found(HOMES, lambda node: node) == expected
    some = [*OURS["Module"], *HOMES[::50]]
    assert found(some, lambda node: [node]) == expected
    assert found(some, lambda node: {"deep": [node]}) == expected
    assert found(some, lambda node: {"_target_": host, argument: node}) == expected


def test_allowing_the_launcher_itself_opens_nothing():
    for allow in (("launcher",), ("launcher.runtime.log",), ("launcher.runtime.log.LogFile",)):
        assert refusal("launcher.runtime.log.LogFile", allow, ()) is not None
        with pytest.raises(RequestError):
            locate("launcher.runtime.log.LogFile", allow, object)


def test_a_listed_class_can_be_built_as_an_argument():
    block = {"_target_": "launcher.models.language_model.SwiGLU", "dim": 4, "hidden": 8, "std": 0.02}
    net = build({"_target_": "torch.nn.Sequential", "_args_": [block]}, ("torch",), nn.Module)
    assert net(torch.ones(1, 4)).shape == (1, 4)


EVIL = """
defaults:
  - lm_single
  - override /model: lm_tiny
  - override /data: text
  - override /steps: [train, save]
train: {{steps: 2, batch_size: 4}}
{section}
"""
GADGETS = {
    "code": """
callbacks:
  - _target_: launcher.extras.loggers.sinks.OwnLogger
    allow: [subprocess]
    key: k._target_
    target:
      _target_: launcher.data.prepare.encode.Encoder
      setting: s
      path: p
      values: [["_target_", "subprocess.Popen"], ["args", ["sh", "-c", "id > precious.txt"]]]
""",
    "an emptied file": """
callbacks:
  - _target_: launcher.extras.loggers.sinks.MLflowLogger
    asked: {_target_: launcher.runtime.log.LogFile, filename: precious.txt, mode: w}
    title: t
    state: {}
""",
    "an emptied file, nested in what is allowed": """
security: {allow: [tests]}
callbacks:
  - _target_: tests.run.callbacks.Diary
    path: {_target_: launcher.runtime.log.LogFile, filename: precious.txt, mode: w}
""",
    "an overwritten file": """
logger:
  others:
    - _target_: launcher.checkpoint.tensorfile.safetensors.FileWriter
      path: precious.txt
""",
}


@pytest.mark.parametrize("section", GADGETS.values(), ids=GADGETS)
def test_a_recipe_that_uses_our_own_classes_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, section):
    monkeypatch.chdir(tmp_path)
    Path("precious.txt").write_text("my thesis\n")
    Path("evil.yaml").write_text(EVIL.format(section=section))
    assert main(["recipe=evil.yaml", "run_dir=run"]) == 2
    assert "of the launcher's own classes none may be named here" in capsys.readouterr().err
    assert Path("precious.txt").read_text() == "my thesis\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.yaml", "precious.txt"]
