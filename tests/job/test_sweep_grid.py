"""The cells of a sweep: every combination, the last override varying fastest."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.config_folders import ConfigFiles
from launcher.job.sweep_grid import Cell, Interval, axes, grid, repeated, values


def cells(overrides: list[str], configs: ConfigFiles) -> tuple[Cell, ...]:
    return grid(axes(overrides, configs))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1,2", "model=lm,lm_tiny"], ["0-1-lm", "1-1-lm_tiny", "2-2-lm", "3-2-lm_tiny"]),
        (["seed=range(1,4)"], ["0-1", "1-2", "2-3"]),
        (["recipe=glob(lm_*,exclude=[*p*,*8b*,*cur*,*drill*])"], ["0"]),
        (["steps=[train],[train,save]"], ["0-train", "1-train_save"]),
        (["seed=3"], ["0"]),
        (["logger.api_key=a,b"], ["0", "1"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_a_sweep_is_every_combination_the_last_varying_fastest(overrides, expected):
    assert [cell.name for cell in cells(overrides, ConfigFiles())] == expected


def test_a_glob_takes_the_options_of_its_group():
    found = cells(["recipe=glob(lm_t*)"], ConfigFiles())
    assert [c.overrides for c in found] == [("recipe=lm_tied_pp2_hsdp2",), ("recipe=lm_tp2",)]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optim.lr=interval(2,1)", "optim.lr: interval(2,1): the lower end comes first"),
        (
            "optim.lr=tag(log,interval(0,1))",
            "optim.lr: tag(log,interval(0,1)): a logarithmic scale needs a lower end above 0",
        ),
        ("recipe=glob(zz*)", "recipe: glob(zz*): matches nothing"),
        ("lm_single", "lm_single: not an override; a recipe is chosen with recipe= (try: recipe=lm_single)"),
    ],
)
def test_values_that_a_sweep_cannot_vary_are_refused(override, text):
    with pytest.raises(RequestError) as caught:
        cells([override], ConfigFiles())
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("override", "interval", "ends"),
    [
        ("optim.lr=interval(1e-4,0.1)", Interval(1e-4, 0.1, False, False), ("optim.lr=0.0001", "optim.lr=0.1")),
        (
            "+optim.lr=tag(log,interval(1e-4,0.1))",
            Interval(1e-4, 0.1, True, False),
            ("+optim.lr=0.0001", "+optim.lr=0.1"),
        ),
        ("model.dim=int(interval(1,4))", Interval(1, 4, False, True), ("model.dim=1", "model.dim=4")),
    ],
    ids=["plain", "log", "whole"],
)
def test_an_interval_has_two_ends(override, interval, ends):
    (axis,) = axes([override], ConfigFiles())
    assert axis.interval == interval
    assert axis.varies
    assert axis.ends == ends


def test_a_cell_is_repeated_with_seeds():
    one = cells(["optim.lr=1,2"], ConfigFiles())[1]
    assert repeated(one, [7]) == (one,)
    two = repeated(one, [7, 8])
    assert [(c.name, c.overrides, c.varied, c.repeat) for c in two] == [
        ("1-2-seed7", ("optim.lr=2", "seed=7"), ("optim.lr=2",), 0),
        ("1-2-seed8", ("optim.lr=2", "seed=8"), ("optim.lr=2",), 1),
    ]


def test_the_varying_values_of_a_cell_hide_secrets():
    one = cells(["+logger.api_key=a,b", "seed=1,2"], ConfigFiles())[3]
    assert values(one) == {"logger.api_key": "***", "seed": "2"}
