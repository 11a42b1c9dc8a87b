"""The network traffic of a predicted step over time: collectives over tp, and of weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.plan.prediction.step_seconds import Network, TpShare
from launcher.plan.schedule.lanes import Lane, Stretch
from launcher.plan.schedule.simulate import Event, Timeline


def lanes(timeline: Timeline, shares: Sequence[TpShare], networks: Sequence[Network]) -> tuple[Lane, ...]:
    """Returns the lanes that are not empty.

    ``shares``: one a stage and piece, stage by stage; ``networks``: one a pipeline rank.
    """
    label = "gradients and weights, hidden and waited for"
    found = (
        Lane("tp", "collectives over tp", tuple(_over_tp(timeline, shares))),
        Lane("data-parallel", label, tuple(_of_weights(timeline, networks))),
    )
    return tuple(lane for lane in found if lane.stretches)


def tp_seconds(e: Event, pieces: int, shares: Sequence[TpShare]) -> float:
    """Returns the seconds of an action that go to collectives over tp."""
    share = shares[e.action.stage * pieces + e.action.micro % pieces]
    of = {"F": share.forward, "B": share.backward, "I": share.first, "W": 0.0}
    return (e.end - e.start) * of[e.action.kind]


def _over_tp(timeline: Timeline, shares: Sequence[TpShare]) -> Iterator[Stretch]:
    """Yields the collectives over tp of each action.

    Only their duration is predicted, not their start, so they are drawn at the end of their action.
    """
    for e in timeline.events:
        seconds = tp_seconds(e, timeline.pieces, shares)
        if seconds:
            yield Stretch(e.rank, e.end - seconds, e.end, f"{e.action}: collectives over tp")


def _of_weights(timeline: Timeline, networks: Sequence[Network]) -> Iterator[Stretch]:
    """Yields one stretch a rank, whenever its parts are really sent.

    The part that the rank waits for is after the schedule, the rest before its end.
    """
    for rank, sent in enumerate(networks):
        end = timeline.makespan + sent.exposed
        if sent.seconds:
            yield Stretch(rank, max(0.0, end - sent.seconds), end, "gradients and weights", sent.parts)
