"""A corpus of mistakes: each gets an answer in words, and every cure passes when pasted and keeps the intention."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

import pytest

import launcher.__main__
from launcher.errors import RequestError
from launcher.job.compose import Depth
from launcher.job.config_folders import RECIPES
from tests.data.prepare.corpora import tokenizer
from tests.mistakes import answers
from tests.mistakes.answers import answer, composed, next_command, refused, rows
from tests.tiers import some_of

TYPED = some_of(rows("typed.txt"), 3)
OWN = some_of(rows("recipes.txt"), 3)
CLASSES = some_of(rows("classes.txt"), 3)
BASE = (
    "defaults: [lm_single, override /model: mlp, override /data: mnist5k, override /optim: sgd, "
    "override /steps: [train], _self_]\n# Small,\n# in three lines.\n"
)
NET = (
    "class Net(nn.Module):\n    def __init__(self, width=16):\n        super().__init__()\n"
    "        self.a, self.b = nn.Linear(784, width), nn.Linear(width, 10)\n"
    "    def forward(self, x):\n        return self.b(torch.relu(self.a(x.flatten(1))))\n"
)
ALONE = ("recipe=lm_single", "data=mnist5k", "steps=[train]", "model=mlp", "optim=sgd")


@pytest.fixture(scope="module", autouse=True)
def known_once():
    """Cache the check of commands, because the answer checks its cures and the tests check them again."""
    before = launcher.__main__.check_words

    @functools.cache
    def found(words: tuple[str, ...], depth: Depth | None) -> RequestError | None:
        try:
            before(words, depth)
        except RequestError as error:
            return error
        return None

    def check_words(words, depth=None):
        if error := found(tuple(words), depth):
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.__main__, "check_words", check_words)
        patch.setattr(answers, "check_words", check_words)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the corpus names."""
    here = tmp_path_factory.mktemp("mistakes")
    for name in ("folder", "old", "folder.json"):
        (here / name).mkdir()
    (here / "empty.txt").touch()
    (here / "tiny.txt").write_text("hello")
    (here / "corpus.txt").write_text("To be or not to be. " * 2000)
    tokenizer(here)
    shutil.copy(RECIPES / "lm_single.yaml", here / "mine.yaml")
    return here


def judge(words, meant, says, said):
    assert says == "-" or says in said
    typed = next_command(words, said)
    if meant is None:
        assert typed is None, said
    if meant:
        assert typed is not None, said
        assert refused(typed) == ""
        assert sorted(typed) == sorted(meant) if "-m" in meant else composed(typed) == composed(meant)


@pytest.mark.parametrize("row", TYPED.values(), ids=TYPED)
def test_a_typed_mistake_is_explained_with_the_cure_that_was_meant(row, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    code, said = answer(row.typed)
    assert code == 2
    judge(row.typed, row.meant, row.says, said)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("typed", OWN, ids=range(len(OWN)))
def test_a_recipe_that_is_wrong_is_told_by_line(typed, tmp_path, monkeypatch, known_once):
    monkeypatch.chdir(tmp_path)
    known_once.cache_clear()  # this test has another file of the same name
    row, text = OWN[typed], typed.replace("\\n", "\n").replace("\\t", "\t")
    text = text.replace("{DEEP}", "[" * 300 + "]" * 300).replace("{LONG}", "1" * 4301).replace("{M}", BASE)
    Path("mine.yaml").write_text(text)
    words = ("recipe=mine.yaml",)
    code, said = answer(words)
    assert code == 2
    judge(words, row.meant and (*words, *row.meant), row.says, said)


@pytest.mark.parametrize("code", CLASSES, ids=range(len(CLASSES)))
def test_user_code_that_fails_is_told_by_its_own_last_line(code, tmp_path, monkeypatch, known_once):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]  # after the test, the module is removed from sys.modules
    known_once.cache_clear()
    row = CLASSES[code]
    text = "import torch\nfrom torch import nn\n" + code.replace("\\n", "\n").replace("{NET}", NET)
    Path("mine.py").write_text(text)
    (section, _, chosen), *arguments = (w.partition("=") for w in row.meant[0].split(","))
    target = "".join(f", {name}: {value}" for name, _, value in arguments)
    words = (*ALONE, "security.allow=[mine]", f"{section}=null", f"{section}={{_target_: mine.{chosen}{target}}}")
    got, said = answer(words)
    assert got == 2
    assert row.says in said
    assert "Traceback" not in said
    assert (typed := next_command(words, said)) is None or refused(typed) == ""
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["mine.py"]
