"""Numbers refuse true and false: ``false`` would be class 0 for ``loss.ignore_index``, ``true`` a rate of 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from launcher.errors import RequestError
from launcher.job.schema import keys
from launcher.job.schema.job import Job
from launcher.job.schema.objective import CrossEntropy
from launcher.job.schema.optim import AdamW, Lion, Muon


def _leaves(note: Any) -> Iterator[type]:
    """Yield the plain types of an annotation, without those inside settings and open mappings."""
    if get_origin(note) is dict or (isinstance(note, type) and issubclass(note, BaseModel)):
        return
    if isinstance(note, type) and not get_args(note):
        yield note
    for part in get_args(note):
        yield from _leaves(part)


NUMBERS = {k: note for k, note in keys.noted(Job) if {int, float} & {*_leaves(note)} and bool not in {*_leaves(note)}}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_takes_neither_true_nor_false(key: str) -> None:
    items = [[switch] * n for switch in (True, False) for n in (1, 2, 3)]
    assert not [bad for bad in (True, False, *items) if keys.accepts(NUMBERS[key], bad)]


def test_the_tested_numbers_include_the_common_settings() -> None:
    assert {"loss.ignore_index", "train.clip_norm", "optim.lr", "optim.betas", "launch.port"} <= {*NUMBERS}
    assert keys.accepts(NUMBERS["optim.lr"], "1e-4")  # a YAML 1.1 reader reads it as text


@pytest.mark.parametrize("bad", [False, True, None, 2**63, "-1", 0.0], ids=str)
def test_a_target_that_is_ignored_is_a_whole_number(bad: Any) -> None:
    with pytest.raises(RequestError):
        CrossEntropy(ignore_index=bad)


@pytest.mark.parametrize("cls", [AdamW, Lion, Muon])
@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0)], ids=["first", "second"])
def test_a_running_mean_that_keeps_all_of_itself_is_refused(cls: type, betas: tuple[float, float]) -> None:
    name = cls.__name__.lower()
    settings = {"adamw": {"betas": betas}} if cls is Muon else {"betas": betas}
    for wrong in (settings, {"groups": {"head": {"betas": betas}}}):
        with pytest.raises(RequestError, match="should be less than 1"):
            cls(name=name, **wrong)
