"""Interpolations are counted before they are resolved: a short file may stand for more than memory holds."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.merge import EXPANDED, expansion


def tower(levels: int, width: int, last: Any) -> dict[str, Any]:
    """Each level names the one below it ``width`` times."""
    return {"a0": last} | {f"a{n + 1}": [f"${{a{n}}}"] * width for n in range(levels)}


LARGE = {
    "lists": tower(9, 10, "x"),
    "text": {"a0": "x"} | {f"a{n + 1}": f"${{a{n}}}" * 10 for n in range(9)},
    "groups": {"a0": {"x": 1}} | {f"a{n + 1}": {str(i): f"${{a{n}}}" for i in range(10)} for n in range(9)},
    "relative names": {"top": {"a0": "x"} | {f"a{n + 1}": [f"${{..a{n}}}"] * 10 for n in range(9)}},
    "long text": {"a0": "x" * 100_000} | {f"a{n + 1}": f"${{a{n}}}" * 10 for n in range(4)},
    "brackets": {"a": [f"${{a[{n - 1}]}}" * 10 if n else "x" for n in range(10)]},
}
SMALL = {
    "nothing": {},
    "a name many times": {"a": "x", "b": ["${a}"] * 1000},
    "itself": {"a": "${a}"},
    "two that name each other": {"a": "${b}${b}", "b": "${a}${a}"},
    "its own section": {"a": {"b": ["${a}"] * 10}},
    "what is not there": {"a": "${nope.nope}" * 10},
    "a resolver": {"a": "${oc.env:HOME}" * 10},
}


@pytest.mark.parametrize("raw", LARGE.values(), ids=LARGE)
def test_too_many_values_are_refused(raw: dict[str, Any]) -> None:
    problem = expansion(raw)
    assert problem is not None
    end = f": its interpolations stand for more than {EXPANDED} values; write values in place of some ${{...}}"
    assert problem.text.endswith(end)


@pytest.mark.parametrize("raw", SMALL.values(), ids=SMALL)
def test_few_are_not(raw: dict[str, Any]) -> None:
    assert expansion(raw) is None


def test_a_long_chain_is_refused_too() -> None:
    problem = expansion({"a0": 1} | {f"a{n + 1}": f"${{a{n}}}" for n in reversed(range(9000))})
    assert problem is not None
    assert problem.text == (
        "the interpolations of this request refer to one another in too long a chain; "
        "write values in place of some ${...}"
    )
