"""Learning rates over the steps."""

from __future__ import annotations

from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job.schema.components import Constant, Cosine, Linear
from launcher.optim.schedule import factor

warmups = st.integers(0, 12)
shares = st.floats(0, 1)
schedules = (
    st.builds(Constant, name=st.just("constant"), warmup_steps=warmups)
    | st.builds(Cosine, name=st.just("cosine"), warmup_steps=warmups, final=shares)
    | st.builds(Linear, name=st.just("linear"), warmup_steps=warmups, final=shares)
)


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
    ],
    ids=["constant", "warmup", "linear", "linear warmup", "cosine", "cosine warmup", "only warmup"],
)
def test_rates_of_five_steps(settings, want):
    assert [factor(settings, step, 5) for step in range(5)] == pytest.approx(want)


@given(schedules, st.integers(1, 60))
def test_it_rises_through_warmup_then_never_again_and_stays_within_0_and_1(settings, total):
    rates = [factor(settings, step, total) for step in range(total)]
    assert all(0 <= r <= 1 for r in rates)
    up, down = rates[: settings.warmup_steps], rates[settings.warmup_steps :]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)


@given(schedules, st.integers(2, 60))
def test_it_ends_at_its_final_share(settings, more):
    total = settings.warmup_steps + more
    assert factor(settings, total - 1, total) == pytest.approx(getattr(settings, "final", 1.0))
    assert factor(settings, total + 5, total) == pytest.approx(getattr(settings, "final", 1.0))
