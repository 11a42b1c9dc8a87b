"""The state that a piece of a sequence leaves is kept as long as a later piece needs it."""

from __future__ import annotations

from launcher.parallel.sequence_chunks import Carry


def test_a_piece_that_runs_again_forgets_what_it_left():
    carry = Carry((2, 3))
    with carry.running(0, 0):
        carry.states.setdefault(0, {})["a"] = [()]
    assert (carry.starts, carry.now, carry.states) == ((0, 2), None, {0: {"a": [()]}})
    with carry.running(0, 0):
        assert carry.states == {}


def test_a_piece_that_went_backward_is_forgotten_and_those_before_it_are_not():
    carry, first, second = Carry((2, 2, 2)), (), ()
    carry.states = {0: {"a": [first, second], "b": [first, second]}, 1: {"a": [first]}}
    carry.forget(0, 1)
    assert carry.states == {0: {"a": [first], "b": [first]}, 1: {"a": [first]}}
    carry.forget(0, 0)
    assert carry.states == {1: {"a": [first]}}
