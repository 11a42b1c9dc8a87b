"""Learning rates over the steps."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from launcher.errors import RequestError
from launcher.job.schema.optim import WSD, Constant, Cosine, CosineRestarts, Linear, NamedSchedule, Polynomial
from launcher.optim.schedule import factor

warmups = st.integers(0, 12)
shares = st.floats(0, 1)
common = {"warmup_steps": warmups, "final": shares}
wsd = st.builds(
    WSD, name=st.just("wsd"), decay_share=shares, decay_steps=st.none() | st.integers(0, 30),
    decay_shape=st.sampled_from(["linear", "1-sqrt"]), **common,
)  # fmt: skip
polynomial = st.builds(Polynomial, name=st.just("polynomial"), power=st.floats(0.1, 4), **common)
restarts = st.builds(
    CosineRestarts, name=st.just("cosine_restarts"), period_steps=st.integers(1, 9),
    period_multiplier=st.integers(1, 3), **common,
)  # fmt: skip
ending = (
    st.builds(Constant, name=st.just("constant"), warmup_steps=warmups)
    | st.builds(Cosine, name=st.just("cosine"), **common)
    | st.builds(Linear, name=st.just("linear"), **common)
    | polynomial
)
falling = ending | wsd


def rates(settings: NamedSchedule, total: int) -> list[float]:
    return [factor(settings, step, total) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (Constant(name="constant"), [1, 1, 1, 1, 1]),
        (Constant(name="constant", warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
        (Linear(name="linear"), [1, 0.75, 0.5, 0.25, 0]),
        (Linear(name="linear", warmup_steps=2, final=0.5), [0.5, 1, 1, 0.75, 0.5]),
        (Cosine(name="cosine", final=0), [1, (1 + cos(pi / 4)) / 2, 0.5, (1 + cos(3 * pi / 4)) / 2, 0]),
        (Cosine(name="cosine", warmup_steps=2), [0.5, 1, 1, 0.55, 0.1]),
        (Cosine(name="cosine", warmup_steps=8), [0.125, 0.25, 0.375, 0.5, 0.625]),
        (Polynomial(name="polynomial"), [1, 9 / 16, 1 / 4, 1 / 16, 0]),
        (Polynomial(name="polynomial", warmup_steps=2, power=0.5, final=0.5), [0.5, 1, 1, 0.5 + sqrt(0.125), 0.5]),
        (CosineRestarts(name="cosine_restarts", period_steps=2), [1, 0.5, 1, 0.5, 1]),
        (CosineRestarts(name="cosine_restarts", period_steps=1, period_multiplier=3), [1, 1, 0.75, 0.25, 1]),
        (WSD(name="wsd"), [1, 1, 1, 1, 0]),
        (WSD(name="wsd", warmup_steps=1, decay_share=0.4, decay_shape="linear", final=0.5), [1, 1, 1, 0.75, 0.5]),
        (WSD(name="wsd", warmup_steps=2, decay_steps=2), [0.5, 1, 1, 1 - sqrt(0.5), 0]),
        (WSD(name="wsd", decay_steps=0), [1, 1, 1, 1, 1]),
    ],
    ids=[
        "constant", "warmup", "linear", "linear warmup", "cosine", "cosine warmup", "only warmup", "square",
        "root", "restarts", "longer periods", "a fifth of it", "linear decay", "1-sqrt decay", "no decay",
    ],
)  # fmt: skip
def test_rates_of_five_steps(settings, want):
    assert rates(settings, 5) == pytest.approx(want)


@given(falling, st.integers(1, 60))
def test_it_rises_through_warmup_then_never_again_and_stays_within_0_and_1(settings, total):
    every = rates(settings, total)
    assert all(0 <= r <= 1 for r in every)
    up, down = every[: settings.warmup_steps], every[settings.warmup_steps :]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)


@given(falling | restarts, st.integers(1, 60))
def test_warmup_begins_with_one_of_its_steps_and_ends_at_the_whole_rate(settings, total):
    warmup = settings.warmup_steps
    assert factor(settings, 0, total) == (1 / warmup if warmup else pytest.approx(rates(settings, total)[0]))
    if 0 < warmup <= total:
        assert factor(settings, warmup - 1, total) == 1


@given(ending, st.integers(2, 60))
def test_it_ends_at_its_final_share(settings, more):
    total = settings.warmup_steps + more
    assert factor(settings, total - 1, total) == pytest.approx(getattr(settings, "final", 1.0))
    assert factor(settings, total + 5, total) == pytest.approx(getattr(settings, "final", 1.0))


@given(wsd, st.integers(1, 60))
def test_a_decay_takes_the_last_steps_down_to_the_final_share_and_leaves_those_before_at_1(settings, more):
    total = settings.warmup_steps + more
    decay = min(settings.decay(total), more)
    stable, down = (
        rates(settings, total)[settings.warmup_steps : total - decay],
        rates(settings, total)[total - decay :],
    )
    assert stable == [1.0] * len(stable)
    assert len(down) == decay
    if decay:
        assert down[-1] == pytest.approx(settings.final)


@given(wsd, st.integers(1, 60))
def test_a_decay_begins_where_the_stable_rate_ends(settings, more):
    """Linear decay has equal steps; in 1-sqrt, the first step is the largest: the square root of one step's share."""
    total = settings.warmup_steps + more
    decay = min(settings.decay(total), more)
    down = [1.0, *rates(settings, total)[total - decay :]]
    steps = [a - b for a, b in pairwise(down)]
    if settings.decay_shape == "linear":
        assert steps == pytest.approx([(1 - settings.final) / max(decay, 1)] * decay)
    elif decay:
        assert max(steps) == steps[0] == pytest.approx((1 - settings.final) * sqrt(1 / decay))


@given(wsd, st.integers(1, 60), st.integers(1, 60))
def test_a_longer_training_has_the_same_rates_up_to_its_decay(settings, more, longer):
    total = settings.warmup_steps + more
    stays = total - min(settings.decay(total), more)
    beyond = total + longer
    stays = min(stays, beyond - min(settings.decay(beyond), beyond - settings.warmup_steps))
    assert rates(settings, total)[:stays] == rates(settings, beyond)[:stays]


@given(st.integers(0, 12), shares, st.integers(2, 60))
def test_a_power_of_1_is_a_straight_line(warmup, final, total):
    power = Polynomial(name="polynomial", warmup_steps=warmup, power=1, final=final)
    assert rates(power, total) == rates(Linear(name="linear", warmup_steps=warmup, final=final), total)


@given(restarts, st.integers(1, 80))
def test_every_restart_is_at_the_whole_rate_and_each_period_falls_within_0_and_1(settings, total):
    every = rates(settings, total)[settings.warmup_steps :]
    start, length = 0, settings.period_steps
    while start < len(every):
        period = every[start : start + length]
        assert period[0] == pytest.approx(1)
        assert period == sorted(period, reverse=True)
        assert all(settings.final - 1e-12 <= r <= 1 + 1e-12 for r in period)
        start, length = start + length, length * settings.period_multiplier


@given(restarts, st.integers(1, 60), st.integers(1, 60))
def test_restarts_are_where_they_are_however_long_the_training_is(settings, total, longer):
    assert rates(settings, total + longer)[:total] == rates(settings, total)


def torchs(kind: type[lr_scheduler.LRScheduler], steps: int, **how: Any) -> list[float]:
    """The rates of torch's own scheduler for a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler, found = kind(optimizer, **how), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@tries(deadline=None)  # torch's first step is slow
@given(st.integers(2, 40), st.floats(0.1, 4))
def test_a_polynomial_is_torchs(total, power):
    want = torchs(lr_scheduler.PolynomialLR, total, total_iters=total - 1, power=power)
    assert rates(Polynomial(name="polynomial", power=power), total) == pytest.approx(want, rel=1e-9, abs=1e-12)


@tries(deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), shares, st.integers(1, 60))
def test_restarts_are_torchs(period, multiplier, final, total):
    how = {"T_0": period, "T_mult": multiplier, "eta_min": final}
    want = torchs(lr_scheduler.CosineAnnealingWarmRestarts, total, **how)
    ours = CosineRestarts(name="cosine_restarts", period_steps=period, period_multiplier=multiplier, final=final)
    assert rates(ours, total) == pytest.approx(want, rel=1e-9, abs=1e-12)


@tries(deadline=None)
@given(warmups, shares, st.integers(2, 60))
def test_after_warmup_a_cosine_is_torchs(warmup, final, more):
    want = torchs(lr_scheduler.CosineAnnealingLR, more, T_max=more - 1, eta_min=final)
    found = rates(Cosine(name="cosine", warmup_steps=warmup, final=final), warmup + more)
    assert found[warmup:] == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"name": "wsd", "decay_shape": "cosine"}, "decay_shape: 'cosine': should be 'linear' or '1-sqrt'"),
        ({"name": "wsd", "decay_share": 1.5}, "decay_share: 1.5: should be at most 1"),
        ({"name": "wsd", "decay_steps": -1}, "decay_steps: -1: should be at least 0"),
        ({"name": "polynomial", "power": 0}, "power: 0: should be more than 0"),
        ({"name": "cosine_restarts", "period_steps": 0}, "period_steps: 0: should be at least 1"),
        ({"name": "cosine_restarts"}, "period_steps: needs a value"),
        (
            {"name": "cosine_restarts", "period_steps": 4, "period_multiplier": 1.5},
            "period_multiplier: 1.5: should be a whole number",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(words, text):
    kind = {"wsd": WSD, "polynomial": Polynomial, "cosine_restarts": CosineRestarts}[words["name"]]
    with pytest.raises(RequestError) as refused:
        kind(**words)
    assert str(refused.value) == text
