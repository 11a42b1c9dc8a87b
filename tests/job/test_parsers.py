"""libyaml and OmegaConf's own reader build the same from every shipped file."""

from __future__ import annotations

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.job import yaml_limits
from launcher.job.config_files import CONF, RECIPES

FILES = sorted([*CONF.rglob("*.yaml"), *RECIPES.rglob("*.yaml")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_file_reads_the_same(path):
    data = yaml_limits.load(path)
    assert OmegaConf.create({} if data is None else data) == OmegaConf.load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_marks_are_the_same(path):
    def marks(loader):
        events = yaml.parse(path.read_text(encoding="utf-8"), Loader=loader)
        return [(type(e), e.start_mark.line, e.start_mark.column) for e in events if isinstance(e, yaml.ScalarEvent)]

    assert marks(yaml_limits.parser(path)) == marks(yaml.SafeLoader)


def test_a_file_of_the_users_is_read_by_python(tmp_path):
    assert yaml_limits.parser(tmp_path / "mine.yaml") is yaml.SafeLoader
