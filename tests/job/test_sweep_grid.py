"""The cells of a sweep: every combination, the last override varying fastest."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.sweep_grid import cells
from launcher.job.yaml.config_files import ConfigFiles


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1,2", "model=lm,lm_tiny"], ["0-1-lm", "1-1-lm_tiny", "2-2-lm", "3-2-lm_tiny"]),
        (["seed=range(1,4)"], ["0-1", "1-2", "2-3"]),
        (["recipe=glob(lm_*,exclude=[*p*,*8b*,*cur*])"], ["0"]),
        (["steps=[train],[train,save]"], ["0-train", "1-train_save"]),
        (["seed=3"], ["0"]),
        (["logger.api_key=a,b"], ["0", "1"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_a_sweep_is_every_combination_the_last_varying_fastest(overrides, expected):
    assert [cell.name for cell in cells(overrides, ConfigFiles())] == expected


def test_a_glob_takes_the_options_of_its_group():
    grid = cells(["recipe=glob(lm_t*)"], ConfigFiles())
    assert [c.overrides for c in grid] == [("recipe=lm_tied_pp2_hsdp2",), ("recipe=lm_tp2",)]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optim.lr=interval(0,1)", "optim.lr: interval(0,1): has no list of values; write optim.lr=A,B"),
        ("recipe=glob(zz*)", "recipe: glob(zz*): matches nothing"),
        ("lm_single", "lm_single: not an override; a recipe is chosen with recipe= (try: recipe=lm_single)"),
    ],
)
def test_what_cannot_be_swept_is_refused(override, text):
    with pytest.raises(RequestError) as caught:
        cells([override], ConfigFiles())
    assert str(caught.value) == text
