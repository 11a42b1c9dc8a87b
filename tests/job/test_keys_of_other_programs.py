"""The tables of other programs' words: each leads to a key, an option or a reason, and to one only."""

from __future__ import annotations

import pytest

from launcher.job.compose import compose
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures.keys_of_other_programs import FOREIGN_NAMES, GROUPS, UNSUPPORTED, VALUES
from launcher.job.cures.options_of_other_programs import ALMOST, NAMES
from launcher.job.overrides import read
from launcher.job.schema import keys

KEYS = {*keys.everywhere()}


def test_every_key_that_a_foreign_name_means_exists() -> None:
    assert {*FOREIGN_NAMES} - KEYS == set()


def test_a_name_means_a_key_or_has_a_reason_but_not_both() -> None:
    names = [name for listed in FOREIGN_NAMES.values() for name in listed]
    assert {*names} & {*UNSUPPORTED} == set()
    assert len(names) == len({*names})


def test_no_valid_key_is_called_unsupported() -> None:
    assert {name for name in UNSUPPORTED if name in KEYS} == set()


def test_a_chosen_group_and_the_options_of_a_cure_exist() -> None:
    configs = ConfigFiles()
    assert {*GROUPS} <= {*configs.groups()}
    assert {*NAMES.values()} <= {*configs.options("steps")}
    assert [(group, name) for group, name in ALMOST if name in configs.options(group)] == []


@pytest.mark.parametrize("cure", sorted({cure for _, cure in (*ALMOST.values(), *VALUES.values()) if cure}))
def test_the_cures_of_the_tables_are_overrides_that_compose(cure: str) -> None:
    assert len(read(cure.split(), [])) == len(cure.split())
    compose(["recipe=lm_single", *cure.split()])
