"""Memory that nobody wrote, and numbers that no seed determines, are named and refused."""

from __future__ import annotations

import pytest

from launcher.parallel.deferred_init import constructor
from launcher.parallel.deferred_init.uninitialized import problems
from tests.parallel import unrecorded

BLANK = "is uninitialized memory: the constructor makes it with torch.empty or a similar function and does not fill it"
LOOSE = "gets different values each time the constructor runs, although torch, random and numpy are seeded"


@pytest.mark.parametrize("maker", [unrecorded.Unwritten, unrecorded.UnwrittenWhole])
def test_memory_that_nobody_wrote_is_named_and_refused(maker):
    found = problems(maker, *constructor.record(maker, 0))
    names = ["bad", "rows", "derived", "cache", "attribute"]
    assert list(map(str, found)) == [f"model: {n} {BLANK}; initialize it in the constructor" for n in names]


def test_a_weight_on_the_meta_device_is_named_and_refused():
    found = problems(unrecorded.OnMeta, *constructor.record(unrecorded.OnMeta, 0))
    text = "model: inner.weight is on the meta device, where it has no values; initialize it in the constructor"
    assert list(map(str, found)) == [text]


@pytest.mark.parametrize("maker", [unrecorded.Unseeded, unrecorded.UnseededWhole])
def test_numbers_that_no_seed_decides_are_named_and_refused(maker):
    found = problems(maker, *constructor.record(maker, 0))
    cure = "seed their source, or keep no state between two constructions"
    assert list(map(str, found)) == [f"model: {n} {LOOSE}; {cure}" for n in ("w", "g")]
