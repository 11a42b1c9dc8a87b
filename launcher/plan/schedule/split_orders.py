"""Schedules that split backwards: input gradients at once, weight gradients in place of bubbles."""

from __future__ import annotations

from collections import Counter, deque

from launcher.plan.schedule.actions import Action, Kind, Row, Schedule


def zero_bubble_h1(ranks: int, chunks: int, micros: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241): 1F1B in which rank r delays r weight gradients; same memory as 1F1B."""
    assert chunks == 1, chunks
    return tuple(_h1(r, ranks, micros) for r in range(ranks))


def _h1(rank: int, ranks: int, micros: int) -> Row:
    ahead = min(micros, ranks - 1 - rank)
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(micros):
        if ahead + m < micros:
            row.append(Action(rank, "F", ahead + m))
        row.append(Action(rank, "I", m))
        if m >= rank:
            row.append(Action(rank, "W", m - rank))
    return (*row, *(Action(rank, "W", m) for m in range(max(0, micros - rank), micros)))


def zero_bubble_v(ranks: int, chunks: int, micros: int) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6), in torch's hand-written order for F, I and W of equal time.

    The order is written for enough micro batches to fill the V. With fewer, the actions of missing micro
    batches are dropped.
    """
    assert chunks == 2, chunks
    whole = max(micros, 2 * ranks - 1)
    rows = (_spelled(_v(r, ranks, whole), r, 2 * ranks - 1 - r) for r in range(ranks))
    return tuple(tuple(a for a in row if a.micro < micros) for row in rows)


def _v(r: int, p: int, m: int) -> str:
    warm = "f" * (2 * (p - r) - 1) + "Ff" * r + "FIW" * (p - r)
    steady = "fiwFIW" * (m - 2 * p + r + 1) + "iwFIW" * (p - r - 1)
    return warm + steady + "iI" * r + "iw" * (p - r) + "W" * r + "w" * r


def dualpipe_v(ranks: int, chunks: int, micros: int) -> Schedule:
    """DualPipeV (DeepSeek), in torch's order: forward and backward alternate where DualPipe overlaps them."""
    assert chunks == 2, chunks
    assert micros >= 2 * ranks, (ranks, micros)
    return tuple(_spelled(_dual(r, ranks, micros), r, 2 * ranks - 1 - r) for r in range(ranks))


def _dual(r: int, p: int, m: int) -> str:
    later = p - r - 1
    warm = "f" * (2 * later) + "fF" * (r + 1) + "I?F" * later
    steady = "fBFb" * (m - 2 * p + r + 1) + "BFb" * later
    cool = ("Bb" * (r + 1))[: r + 1] + ("Ii" * (r + 1))[r + 1 :]
    return warm + steady + cool + "?i" * later + "?" * (r + 1)


def _spelled(word: str, there: int, back: int) -> Row:
    """Returns the actions that ``word`` spells: small letters for stage ``there``, capitals for ``back``.

    Each letter takes the next micro batch of its stage; ``?`` is the oldest weight gradient that is delayed.
    """
    done: Counter[tuple[int, str]] = Counter()
    kept: deque[Action] = deque()
    row = []
    for letter in word:
        if letter == "?":
            row.append(kept.popleft())
            continue

        # a full backward counts as its two halves
        stage = there if letter.islower() else back
        kind = letter.upper()
        halves = "IW" if kind == "B" else kind
        action = Action(stage, KINDS[kind], done[stage, halves[0]])
        done.update((stage, half) for half in halves)
        if kind == "I":
            kept.append(Action(stage, "W", action.micro))
        row.append(action)
    return tuple(row)


KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
