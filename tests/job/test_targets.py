"""Only classes and functions of the right kind from a trusted package can be named; nothing else is run."""

from __future__ import annotations

import sys

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.user_class import Target
from launcher.job.targets import build, locate

OURS = (
    "of the launcher's own classes only launcher.models.language_model.Attention and "
    "launcher.models.language_model.SwiGLU may be named here; a class of yours may derive from this one"
)
REJECTED = {
    "torch.load": "torch.load: is not a Module class",
    "torch.hub.load": "torch.hub.load: is not a Module class",
    "torch.utils.cpp_extension.load_inline": "torch.utils.cpp_extension.load_inline: is not a Module class",
    "torch.ops.load_library": "torch.ops.load_library: is not a Module class",
    "torch.serialization.load": "torch.serialization.load: is not a Module class",
    "torch.jit.load": "torch.jit.load: is not a Module class",
    "torch.os.system": "torch.os.system: is not a Module class",
    "torch.optim.AdamW": "torch.optim.AdamW: is not a Module class",
    "torch.nn.Linear.__init__": "torch.nn.Linear.__init__: a private name may not be used",
    "torch._C": "torch._C: a private name may not be used",
    "torch.nn.Lineer": "torch.nn.Lineer: torch.nn has no 'Lineer', did you mean 'Linear'? "
    "(try: model._target_=torch.nn.Linear)",
    "torch.nothing.Linear": "torch.nothing.Linear: torch has no 'nothing'",
    "os.system": "os.system: package 'os' is not trusted: it is Python's own",
    "builtins.open": "builtins.open: package 'builtins' is not trusted: it is Python's own",
    "nonesuch.models.ResNet": "nonesuch.models.ResNet: package 'nonesuch' is not trusted: there is no such package",
    "numpy.ndarray": "numpy.ndarray: package 'numpy' is not trusted "
    "(trusted: torch) (try: 'security.allow=[torch,numpy]')",
    "open": "open: should be the dotted path of a class, such as package.module.Class",
    "torch.nn.Linear()": "torch.nn.Linear(): should be the dotted path of a class, such as package.module.Class",
    "launcher.nothing.Net": f"launcher.nothing.Net: {OURS}",
    "launcher.models.language_model.Decoder": f"launcher.models.language_model.Decoder: {OURS}",
    "launcher.models.language_model.nn.Linear": f"launcher.models.language_model.nn.Linear: {OURS}",
    "launcher.models.language_model": f"launcher.models.language_model: {OURS}",
    "launcher": "launcher: should be the dotted path of a class, such as package.module.Class",
}


@pytest.mark.parametrize("path", REJECTED)
def test_targets_that_are_no_class_of_the_right_kind_are_refused(path):
    with pytest.raises(RequestError) as caught:
        locate(path, ("torch",), torch.nn.Module, key="model._target_")
    assert str(caught.value) == f"model._target_: {REJECTED[path]}"


def test_nothing_of_a_package_that_is_not_trusted_is_imported(tmp_path, monkeypatch):
    (tmp_path / "burglar.py").write_text("raise SystemExit('was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError):
        locate("burglar.Net", (), torch.nn.Module)
    assert "burglar" not in sys.modules


def test_a_class_seen_through_a_trusted_package_but_defined_elsewhere_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "front.py").write_text("from torch.nn import Linear\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError) as caught:
        locate("front.Linear", ("front",), torch.nn.Module)
    assert str(caught.value) == (
        "_target_: front.Linear: the class is defined in torch.nn.modules.linear, which is not trusted"
    )


def test_a_trusted_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError) as caught:
        locate("broken.Net", ("broken",), torch.nn.Module)
    assert str(caught.value) == (
        "_target_: broken.Net: importing broken failed: ModuleNotFoundError: No module named "
        "'not_installed_anywhere' (broken.py:1: import not_installed_anywhere)"
    )


def test_a_trusted_package_may_be_a_part_of_one():
    assert locate("torch.nn.Linear", ("torch.nn",), torch.nn.Module) is torch.nn.Linear
    with pytest.raises(RequestError):
        locate("torch.optim.AdamW", ("torch.nn",), torch.optim.Optimizer)


def test_a_model_is_built_with_its_arguments_and_nested_classes():
    target = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, {"_target_": "torch.nn.ReLU"}],
    }
    model = build(target, ("torch",), torch.nn.Module)
    assert [type(m).__name__ for m in model.children()] == ["Linear", "ReLU"]


def test_arguments_of_the_caller_precede_those_of_the_target():
    weight = torch.nn.Parameter(torch.zeros(2))
    target = Target.model_validate({"_target_": "torch.optim.SGD", "lr": 0.5})
    optimizer = build(target, ("torch",), torch.optim.Optimizer, [weight])
    assert optimizer.param_groups[0]["params"] == [weight]
    assert optimizer.param_groups[0]["lr"] == 0.5


BAD = {
    "a nested function": (
        {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "builtins.open", "file": "x", "mode": "w"}]},
        "model._args_.0._target_: builtins.open: package 'builtins' is not trusted: it is Python's own",
    ),
    "a nested class of ours of another kind": (
        {"_target_": "torch.nn.Sequential", "x": {"y": {"_target_": "launcher.errors.Problem"}}},
        f"model.x.y._target_: launcher.errors.Problem: {OURS}",
    ),
    "the same, deeper": (
        {"_target_": "torch.nn.Linear", "x": {"_target_": "torch.Size", "y": {"_target_": "launcher.errors.Problem"}}},
        f"model.x.y._target_: launcher.errors.Problem: {OURS}",
    ),
    "what is neither a class nor a function": (
        {"_target_": "torch.nn.Linear", "in_features": {"_target_": "torch.backends.cudnn"}},
        "model.in_features._target_: torch.backends.cudnn: is not a class, nor a function",
    ),
    "a function of a package whose classes are trusted": (
        {"_target_": "torch.nn.Sequential", "x": {"_target_": "torch.load", "f": "x"}},
        "model.x._target_: torch.load: is a function: security.allow has to name it, or its module "
        "(try: 'security.allow=[torch,torch.load]')",
    ),
    "a function at the top": (
        {"_target_": "torch.hub.load"},
        "model._target_: torch.hub.load: is a function: security.allow has to name it, or its module "
        "(try: 'security.allow=[torch,torch.hub.load]')",
    ),
    "a keyword of Hydra": (
        {"_target_": "torch.nn.ReLU", "_partial_": True},
        "model._target_: torch.nn.ReLU: _partial_ is not supported; only _target_ and _args_ are",
    ),
    "an argument too many": (
        {"_target_": "torch.nn.ReLU", "colour": 3},
        "model._target_: torch.nn.ReLU: its arguments do not fit: got an unexpected keyword argument 'colour' "
        "(it takes inplace)",
    ),
}


MINE = """
import subprocess
from dataclasses import dataclass
from shutil import rmtree

from torch import nn


@dataclass
class Config:
    width: int
    depth: int = 1


class Net(nn.Sequential):
    def __init__(self, config):
        super().__init__(*(nn.Linear(config.width, config.width) for _ in range(config.depth)))

    @classmethod
    def from_config(cls, config):
        return cls(config)


def deep(width, depth=3):
    return Net(Config(width, depth))


def wrong(width):
    return Config(width)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_of_factories.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine_of_factories"
    sys.modules.pop("mine_of_factories", None)


CONFIG = {"_target_": "mine_of_factories.Config", "width": 2, "depth": 2}


@pytest.mark.parametrize(
    ("target", "layers"),
    [
        ({"_target_": "mine_of_factories.Net", "config": CONFIG}, 2),
        ({"_target_": "mine_of_factories.Net.from_config", "config": CONFIG}, 2),
        ({"_target_": "mine_of_factories.deep", "width": 2}, 3),
    ],
    ids=["an object in a model", "a method of a class", "a function"],
)
def test_a_model_is_made_of_whatever_the_users_file_has(mine, target, layers):
    model = build(target, (mine,), torch.nn.Module, key="model._target_")
    assert (type(model).__name__, len(model)) == ("Net", layers)


FOREIGN = {
    "what a function gives is of the wrong kind": (
        {"_target_": "mine_of_factories.wrong", "width": 2},
        "model._target_: mine_of_factories.wrong: returns Config, but Module is expected",
    ),
    "a function that it imports": (
        {"_target_": "mine_of_factories.rmtree", "path": "x"},
        "model._target_: mine_of_factories.rmtree: the function is defined in shutil, which is not trusted",
    ),
    "a class that it imports, for an argument": (
        {"_target_": "mine_of_factories.Net", "config": {"_target_": "mine_of_factories.subprocess.Popen"}},
        "model.config._target_: mine_of_factories.subprocess.Popen: the class is defined in subprocess, "
        "which is not trusted",
    ),
    "a misspelt argument of a function": (
        {"_target_": "mine_of_factories.deep", "width": 2, "dept": 3},
        "model._target_: mine_of_factories.deep: its arguments do not fit: got an unexpected keyword argument 'dept', "
        "did you mean 'depth'? (try: ~model.dept model.depth=3)",
    ),
}


@pytest.mark.parametrize(("target", "text"), FOREIGN.values(), ids=FOREIGN)
def test_untrusted_or_wrong_objects_in_a_trusted_file_are_refused(mine, target, text):
    with pytest.raises(RequestError) as caught:
        build(target, (mine,), torch.nn.Module, key="model._target_")
    assert str(caught.value) == text


@pytest.mark.parametrize(("target", "text"), BAD.values(), ids=BAD)
def test_nothing_is_built_of_bad_arguments(target, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        build(target, ("torch",), torch.nn.Module, key="model._target_")
    assert str(caught.value) == text
    assert list(tmp_path.iterdir()) == []
