"""A key that is typed in a wrong place is neither printed nor written anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, run, shape
from tests.run.secret_words import FILES, FORMS, KEYS, NAMES, RIGHT, typed

SOME = [("hex", RIGHT), ("words", "encryptt"), ("base64", "encrpyt")]
"""A few keys and names; the drill ``keys`` takes all of them."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shown(capfd, words: list[str], secret: str) -> list[str]:
    """Return the places that show ``secret``, in upper or lower case."""
    code, secret = main(words), secret.lower()
    said = "".join(capfd.readouterr()).lower()
    seen = [f"printed ({code}): {line}" for line in said.splitlines() if secret in line]
    paths = [p for p in Path().rglob("*") if p.suffix != ".yaml" or p.name == "config.yaml"]
    held = [p for p in paths if secret in p.name.lower() or (p.is_file() and secret.encode() in p.read_bytes().lower())]
    return [*seen, *map(str, held)]


@pytest.mark.parametrize("form", FORMS)
def test_a_key_on_the_command_line_is_never_printed(form, capfd):
    for which, name in SOME[: 2 if " " in form else 3]:
        for words in typed(form, name, KEYS[which]):
            assert shown(capfd, ["show=config", *words], KEYS[which]) == []


@pytest.mark.parametrize("form", FILES, ids=range(len(FILES)))
def test_a_key_in_a_recipe_is_never_printed(form, capfd):
    base = "defaults: [lm_single, _self_]\n"
    for which, name in SOME[:2]:
        Path("mine.yaml").write_text(base + form.format(name=name, key=KEYS[which]))
        assert shown(capfd, ["recipe=mine.yaml", "show=config"], KEYS[which]) == []


@pytest.mark.parametrize("which", ["hex", "words"])
@pytest.mark.parametrize("form", ["env:{key}", "file:{key}", "{key}"])
def test_a_key_in_place_of_its_location_is_never_printed(form, which, capfd):
    words = [*TINY, *shape(), "runs=runs", f"checkpoint.encrypt={form.format(key=KEYS[which])}"]
    assert shown(capfd, words, KEYS[which]) == []
    assert shown(capfd, [*words, "show=plan"], KEYS[which]) == []
    assert not Path("runs").exists()


def test_a_name_that_may_be_a_key_is_written_nowhere_when_it_is_a_name(capfd, monkeypatch):
    monkeypatch.setenv("hunter2correcthorse", "5a" * 32)
    words = ["steps=[train,save]", *shape(), "checkpoint.encrypt=env:hunter2correcthorse"]
    run(Path("run"), *words, steps=1)
    capfd.readouterr()
    held = [p for p in Path("run").rglob("*") if p.is_file() and b"hunter2correcthorse" in p.read_bytes()]
    assert [str(p) for p in held] == ["run/checkpoints/step-000001/manifest.json"]  # it says where the key is
    assert "checkpoint.encrypt=env:***: applied" in " ".join(Path("run/plan.txt").read_text().split())


def test_a_key_in_a_sweep_is_never_printed(capfd):
    hexes, words = KEYS["hex"], KEYS["words"]
    sweep = ["-m", "recipe=lm_single", "sweep_dir=sweep", "optim.lr=fast,slow"]
    for name, key in itertools.product((RIGHT, "encryptt"), (hexes, f"env:{words}", f"{hexes},{words}")):
        for secret in (hexes, words):
            assert shown(capfd, [*sweep, f"checkpoint.{name}={key}"], secret) == []


def test_not_when_a_class_of_the_users_own_says_it(capfd):
    Path("mine.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n"
        "    def __init__(self, encryptt):\n        raise ValueError(f'what is {encryptt}?')\n"
    )
    words = ["recipe=lm_single", "security.allow=[mine]", "show=plan"]
    for form in ("model={{_target_: mine.M, encryptt: {key}}}", "model.encryptt={key}"):
        own = [form.format(key=KEYS["words"])]
        chosen = [] if "_target_" in form else ["model={_target_: mine.M}"]
        assert shown(capfd, [*words, *chosen, *own], KEYS["words"]) == []


def test_every_name_is_tried_by_the_drill():
    assert {name for _, name in SOME} <= {*NAMES}
