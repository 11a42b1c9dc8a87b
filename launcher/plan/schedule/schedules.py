"""Pipeline schedules as data: which action each rank runs, in which order."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A forward, full backward, input gradient or weight gradient of one micro batch on one virtual stage.

    It prints as torch writes it: ``3F0`` is stage 3, forward, micro batch 0.
    """

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Row = tuple[Action, ...]
Schedule = tuple[Row, ...]
"""One row per pipeline rank."""


Groups = Sequence[range]
"""Groups of micro batches; each group passes through one chunk after the other."""


def breadth_first(ranks: int, chunks: int, micros: int) -> Schedule:
    """GPipe: all forwards, then all backwards; with several chunks Looped BFS (arXiv 2211.05953)."""
    everything = [range(micros)]
    return tuple(_row(r, ranks, chunks, everything, warm=chunks * micros) for r in range(ranks))


def depth_first(ranks: int, chunks: int, micros: int) -> Schedule:
    """1F1B; with several chunks it is interleaved (arXiv 2104.04473).

    Groups of micro batches pass through chunk after chunk. A rank is ahead of the next one by one forward,
    with several chunks by two: the second one hides the transfer.
    """
    return _in_groups(ranks, chunks, micros, 1 if chunks == 1 else 2)


def interleaved_less_memory(ranks: int, chunks: int, micros: int) -> Schedule:
    """MindSpore's less-memory interleaved 1F1B: each rank is ahead of the next one by one forward.

    The step is as short as that of ``depth_first`` only if transfers take no time.
    """
    return _in_groups(ranks, chunks, micros, 1)


def _in_groups(ranks: int, chunks: int, micros: int, lead: int) -> Schedule:
    groups = grouped(ranks, micros)
    first = (chunks - 1) * len(groups[0])
    return tuple(_row(r, ranks, chunks, groups, warm=lead * (ranks - 1 - r) + first) for r in range(ranks))


def forwards(places: tuple[int, ...], micros: int) -> Schedule:
    """Forwards only: groups of micro batches pass through the stages of a rank in turn, on any placement."""
    ranks = max(places) + 1
    rank_stages = [[s for s, rank in enumerate(places) if rank == r] for r in range(ranks)]
    groups = grouped(ranks, micros)
    return tuple(
        tuple(Action(s, "F", m) for group in groups for s in mine for m in group) for mine in rank_stages
    )


def grouped(ranks: int, micros: int) -> Groups:
    """Returns groups of ``ranks`` micro batches; the first also takes the remainder, as in MindSpore.

    >>> grouped(4, 10)
    [range(0, 6), range(6, 10)]
    """
    first = min(micros, ranks + micros % ranks)
    return [range(first), *(range(m, m + ranks) for m in range(first, micros, ranks))]


def _row(rank: int, ranks: int, chunks: int, groups: Groups, *, warm: int) -> Row:
    """Returns ``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Backwards take groups in the order of their forwards, and within a group the last chunk first.
    """
    ahead = _across(rank, ranks, range(chunks), groups, kind="F")
    back = _across(rank, ranks, range(chunks)[::-1], groups, kind="B")
    turns = list(chain.from_iterable(zip(ahead[warm:], back, strict=False)))
    return (*ahead[:warm], *turns, *back[len(turns) // 2 :])


def _across(rank: int, ranks: int, chunks: range, groups: Groups, *, kind: Literal["F", "B"]) -> Row:
    return tuple(Action(c * ranks + rank, kind, m) for group in groups for c in chunks for m in group)


def seqpipe(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """SeqPipe: a group has as many micro batches as there are ranks.

    The micro number of an action is micro batch x ``pieces`` + piece.
    """
    return _order(ranks, chunks, _groups(ranks, micros), pieces, lead=1 if chunks == 1 else 2)


def seqvpp(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """SeqVPP: a group has as many pieces as there are ranks, so fewer micro batches are in flight.

    It needs ranks >= pieces. If pieces do not divide ranks, a group has one micro batch more than in
    MindSpore: with fewer pieces than ranks in a group, the first rank would wait for its own work to return.
    """
    return _order(ranks, chunks, _groups(-(-ranks // pieces), micros), pieces, lead=2)


def seqsmartvpp(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """SeqSmartVPP: ``seqvpp`` with a lead of one forward.

    It holds the fewest activations and waits for every transfer.
    """
    return _order(ranks, chunks, _groups(-(-ranks // pieces), micros), pieces, lead=1)


def _groups(size: int, micros: int) -> list[range]:
    """Returns groups of ``size`` micro batches; the first ones also take one each of the remainder.

    >>> _groups(4, 10)
    [range(0, 5), range(5, 10)]
    """
    count = max(1, micros // size)
    sizes = [micros // count + (n < micros % count) for n in range(count)]
    starts = [sum(sizes[:n]) for n in range(count)]
    return [range(start, start + n) for start, n in zip(starts, sizes, strict=True)]


def _order(ranks: int, chunks: int, groups: list[range], pieces: int, *, lead: int) -> Schedule:
    ahead = [(c, m, q) for group in groups for c in range(chunks) for m in group for q in range(pieces)]
    first = (chunks - 1) * len(groups[0]) * pieces + pieces - 1
    return tuple(
        _sequence_row(r, ranks, ahead, pieces, warm=lead * (ranks - 1 - r) + first) for r in range(ranks)
    )


def _sequence_row(rank: int, ranks: int, ahead: list[tuple[int, int, int]], pieces: int, *, warm: int) -> Row:
    """Returns ``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Backwards take micro batches in the order of their forwards, and of one micro batch the newest piece
    first: the backward of a later piece computes gradients of what it read from earlier ones.
    """
    queue: deque[int] = deque()
    forwarded: dict[int, list[tuple[int, int]]] = defaultdict(list)
    row: list[Action] = []

    def back() -> None:
        micro = queue.popleft()
        chunk, piece = forwarded[micro].pop()
        row.append(Action(chunk * ranks + rank, "B", micro * pieces + piece))

    for at, (chunk, micro, piece) in enumerate(ahead):
        row.append(Action(chunk * ranks + rank, "F", micro * pieces + piece))
        queue.append(micro)
        forwarded[micro].append((chunk, piece))
        if at >= min(warm, len(ahead) - 1):
            back()
    while queue:
        back()
    return tuple(row)


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
    enough = max(micros, 2 * ranks - 1)
    rows = (_spelled(_v(r, ranks, enough), r, 2 * ranks - 1 - r) for r in range(ranks))
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


Order = Callable[..., Schedule]
"""(ranks, chunks, micros) -> schedule, or (ranks, chunks, micros, pieces) if sequences are cut."""


@dataclass(frozen=True)
class Rule:
    """A scheduler: its order, and what it requires.

    ``v``: exactly two virtual stages per rank, placed in a V. ``single``: one stage per rank.
    ``split``: it splits backwards into input and weight gradients. ``full``: at least as many micro batches
    as virtual stages. ``seq``: it takes pieces of sequences. ``several``: several virtual stages per rank,
    and no more pieces than ranks.
    """

    order: Order
    v: bool = False
    single: bool = False
    split: bool = False
    full: bool = False
    seq: bool = False
    several: bool = False


RULES: Final[Mapping[str, Rule]] = {
    "gpipe": Rule(breadth_first),
    "1f1b": Rule(depth_first),
    "zero_bubble_h1": Rule(zero_bubble_h1, single=True, split=True),
    "zero_bubble_v": Rule(zero_bubble_v, v=True, split=True),
    "dualpipe_v": Rule(dualpipe_v, v=True, split=True, full=True),
    "seqpipe": Rule(seqpipe, seq=True),
    "seqvpp": Rule(seqvpp, seq=True, several=True),
    "seqsmartvpp": Rule(seqsmartvpp, seq=True, several=True),
}


def placement(ranks: int, chunks: int, v: bool = False) -> tuple[int, ...]:
    """Returns the rank of each virtual stage: round after round, or there and back.

    >>> placement(2, 2), placement(2, 2, v=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for chunk in range(chunks) for rank in (back if v and chunk % 2 else there))


def build(
    scheduler: str, ranks: int, chunks: int, micros: int, less_memory: bool = False, pieces: int = 1
) -> Schedule:
    """Returns the order of ``scheduler`` on ``ranks`` x ``chunks`` virtual stages, placed as its rule says.

    One rank has no bubble to fill: it runs one micro batch after the other, or with gpipe all forwards first.
    ``less_memory`` is for interleaved 1f1b. With ``pieces``, the micro number of an action is
    micro batch x pieces + piece.
    """
    if less_memory:
        return interleaved_less_memory(ranks, chunks, micros)
    if ranks == 1 and scheduler != "gpipe":
        scheduler = "1f1b"
    known = RULES[scheduler]
    return known.order(ranks, chunks, micros, pieces) if known.seq else known.order(ranks, chunks, micros)


def forward_only(places: tuple[int, ...], micros: int) -> Schedule:
    """Returns the schedule of an evaluation: every forward once, no backward."""
    return forwards(places, micros)


def validate(schedule: Schedule, place: tuple[int, ...], micros: int, pieces: int = 1) -> list[str]:
    """Returns the actions that are missing, repeated, unknown or on the wrong rank; empty if there are none.

    Each stage must run each micro batch forward once and backward once: B, or I and W. ``simulate`` checks
    the order, except that of the pieces of one micro batch, which is checked here: forward in order, backward
    in reverse. ``micros`` counts pieces.
    """
    flaws = []
    done: dict[tuple[int, int], str] = defaultdict(str)

    # each action on the rank of its stage
    for rank, row in enumerate(schedule):
        for a in row:
            done[a.stage, a.micro] += a.kind
            if not 0 <= a.stage < len(place):
                flaws.append(f"{a} on rank {rank}: stage {a.stage} does not exist; there are {len(place)}")
            elif not 0 <= a.micro < micros:
                flaws.append(f"{a} on rank {rank}: micro batch {a.micro} does not exist; there are {micros}")
            elif place[a.stage] != rank:
                flaws.append(f"{a} is on rank {rank}, but its stage is on rank {place[a.stage]}")

    # nothing missing, nothing twice
    for stage in range(len(place)):
        for micro in range(micros):
            kinds = "".join(sorted(done[stage, micro]))
            if kinds not in ("BF", "FIW"):
                does = ", ".join(kinds) or "nothing"
                flaws.append(
                    f"stage {stage}, micro batch {micro}: runs {does}; it needs F and B, or F, I and W"
                )
    return flaws + _disorder(schedule, pieces)


def _disorder(schedule: Schedule, pieces: int) -> list[str]:
    """Returns the actions on pieces of one micro batch that are in a wrong order."""
    last: dict[tuple[int, str, int], int] = {}
    flaws = []
    for row in schedule:
        for a in row:
            before = last.get((a.stage, a.kind, a.micro // pieces), a.micro)
            if a.micro < before if a.kind == "F" else a.micro > before:
                flaws.append(f"{a} comes after {Action(a.stage, a.kind, before)}, of the same micro batch")
            last[a.stage, a.kind, a.micro // pieces] = a.micro
    return flaws
