"""When Python collects garbage."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASK = """
import gc, weakref
from launcher.runtime import gc_thresholds

class Knot: pass

def tied():
    knot = Knot()
    knot.self = knot
    return weakref.ref(knot)

usual = gc.get_threshold()
{before}
old = tied()
gc_thresholds.as_usual()
assert gc.get_threshold() == usual
new = tied()
gc.collect()
print(old() is None, new() is None)
"""


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("gc_thresholds.seldom()", "False True"),
        ("", "True True"),
        ("usual = 9, 9, 9; gc.set_threshold(*usual)", "True True"),
    ],
    ids=["after a start", "in a script of one's own", "which has its own mind"],
)
def test_objects_of_the_start_are_not_searched_by_the_garbage_collector(before, found):
    ask = ASK.format(before=before)
    assert (
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
        == found.split()
    )
