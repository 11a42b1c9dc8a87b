"""MindSpore's sequence pipelines, in which a micro batch passes the stages in pieces of its sequence."""

from __future__ import annotations

from collections import defaultdict, deque

from launcher.plan.schedule.actions import Action, Row, Schedule


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
    """SeqSmartVPP: ``seqvpp`` with a lead of one forward. It holds least and waits for every transfer."""
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
    return tuple(_row(r, ranks, ahead, pieces, warm=lead * (ranks - 1 - r) + first) for r in range(ranks))


def _row(rank: int, ranks: int, ahead: list[tuple[int, int, int]], pieces: int, *, warm: int) -> Row:
    """Returns ``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Backwards take micro batches in the order of their forwards, and of one micro batch the newest piece
    first: the backward of a later piece computes gradients of what it read from earlier ones.
    """
    queue: deque[int] = deque()
    there: dict[int, list[tuple[int, int]]] = defaultdict(list)
    row: list[Action] = []

    def back() -> None:
        micro = queue.popleft()
        chunk, piece = there[micro].pop()
        row.append(Action(chunk * ranks + rank, "B", micro * pieces + piece))

    for at, (chunk, micro, piece) in enumerate(ahead):
        row.append(Action(chunk * ranks + rank, "F", micro * pieces + piece))
        queue.append(micro)
        there[micro].append((chunk, piece))
        if at >= min(warm, len(ahead) - 1):
            back()
    while queue:
        back()
    return tuple(row)
