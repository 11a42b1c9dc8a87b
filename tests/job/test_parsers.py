"""libyaml and OmegaConf's own reader build the same values from every shipped file."""

from __future__ import annotations

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.job import yaml_limits
from launcher.job.config_folders import CONF, RECIPES

FILES = sorted([*CONF.rglob("*.yaml"), *RECIPES.rglob("*.yaml")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_file_reads_the_same(path):
    data = yaml_limits.load(path)
    assert OmegaConf.create({} if data is None else data) == OmegaConf.load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_both_parsers_give_the_same_lines_and_columns(path):
    def marks(loader):
        events = yaml.parse(path.read_text(encoding="utf-8"), Loader=loader)
        return [(type(e), e.start_mark.line, e.start_mark.column) for e in events if isinstance(e, yaml.ScalarEvent)]

    assert marks(yaml_limits.parser(path)) == marks(yaml.SafeLoader)


def test_a_file_of_the_users_is_read_by_python(tmp_path):
    assert yaml_limits.parser(tmp_path / "mine.yaml") is yaml.SafeLoader


def test_keys_are_text_as_written(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("on: {no: off, 1: 1, 0x1f: 2, null: 3, 1.50: 4}\nparts: &it {yes: on}\nboth: {<<: *it, y: 1}\n")
    assert yaml_limits.load(file) == {
        "on": {"no": False, "1": 1, "0x1f": 2, "null": 3, "1.50": 4},
        "parts": {"yes": True},
        "both": {"yes": True, "y": 1},
    }


def test_a_key_that_yaml_reads_as_true_is_not_set_twice(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("on: 1\non: 2\n")
    with pytest.raises(yaml.constructor.ConstructorError, match="found duplicate key on"):
        yaml_limits.load(file)


def test_an_unchanged_file_is_walked_once(tmp_path, monkeypatch):
    walked = []
    monkeypatch.setattr(yaml_limits, "_walked", lambda path, text: walked.append(text))
    file = tmp_path / "mine.yaml"
    for text in ("seed: 1", "seed: 1", "seed: 20"):
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        yaml_limits.check(file)
    assert walked == ["seed: 1", "seed: 20"]
