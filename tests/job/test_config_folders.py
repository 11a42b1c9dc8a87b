"""The files that are options: those of the shipped and named folders, and those beside a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.config_folders import ConfigFiles


def test_folders_below_a_recipe_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far/away").mkdir(parents=True)
    for name in ("mine.yaml", "far/other.yaml", "far/away/third.yaml"):
        (tmp_path / name).write_text("defaults: [lm_single, _self_]\n")
    options = ConfigFiles.from_folders(None, tmp_path).options("recipe")
    assert "mine" in options
    assert not {"far/other", "far/away/third"} & set(options)
    monkeypatch.chdir(tmp_path)
    assert compose(["recipe=mine.yaml"]).job.name == "mine"


def test_subfolders_of_the_folder_of_options_are_searched(tmp_path: Path) -> None:
    (tmp_path / "recipes/far").mkdir(parents=True)
    (tmp_path / "recipes/far/other.yaml").write_text("defaults: [lm_single, _self_]\n")
    assert "far/other" in ConfigFiles.from_folders(tmp_path).options("recipe")


def test_no_group_is_above_its_folder() -> None:
    assert ConfigFiles().options("model/../..") == ()


@pytest.mark.parametrize("defaults", ["[mine]", "[other]", "[lm_single, /recipe: mine]"])
def test_a_file_that_includes_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\n")
    (tmp_path / "other.yaml").write_text("defaults: [mine]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError):
        compose(["recipe=mine.yaml"])


def test_control_characters_of_a_file_reach_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.__main__ import main

    (tmp_path / "mine.yaml").write_text('defaults: [lm_single, _self_]\n"tr\\e[31m\\nain": 3\ntrain: {"\\x9b1": 2}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert "  tr\\x1b[31m\\nain: unknown key" in said
    assert "  train.\\x9b1: unknown key" in said
    assert "\x1b" not in said
    assert "\x9b" not in said
