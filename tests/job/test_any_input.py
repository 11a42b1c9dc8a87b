"""Any typed text gives either a Job or a list of problems."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.job.compose import BadRequest, compose
from launcher.job.cures.report import render
from launcher.job.schema import keys

KEYS = sorted({*keys.everywhere(), "parallel.pipeline.stage_config.layers.0", "parallel.operators.a.in", "x.y", ""})
WORDS = "abc,1,-1,0,null,[],{},true,1.5,nan,'',${seed},${nope},${x,???,[null],a=b,é,-,lm,glob(*),{name: lm},{1: 2}"
override = st.builds(
    lambda plus, key, cut, equals, value: plus + key[: len(key) - cut] + equals + value,
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from(KEYS),
    st.integers(0, 1),
    st.sampled_from(["=", ""]),
    st.sampled_from([*WORDS.split(","), "[[1,2],[3]]"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(override, min_size=1, max_size=3))
def test_anything_typed_is_understood_or_explained(typed):
    try:
        found, origins = (), compose(typed).origins
    except BadRequest as error:
        found, origins = error.problems, error.origins
    assert all(p.text for p in found)
    assert render(found, origins).startswith("error: ")
