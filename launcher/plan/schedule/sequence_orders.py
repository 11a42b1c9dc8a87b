"""MindSpore's sequence pipelines: a micro batch passes the stages in pieces of its sequence."""

from __future__ import annotations

from collections import defaultdict, deque

from launcher.plan.schedule.actions import Action, Row, Schedule


def seqpipe(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """As many micro batches as ranks go together.

    An action's micro number is micro batch x ``pieces`` + piece.
    """
    return _order(ranks, chunks, _groups(ranks, micros), pieces, lead=1 if chunks == 1 else 2)


def seqvpp(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """As many pieces as ranks go together, so fewer micro batches are in flight. Needs ranks >= pieces.

    Where pieces do not divide ranks, one micro batch more than MindSpore takes: with fewer pieces than ranks
    the first rank would wait for its own work to come round.
    """
    return _order(ranks, chunks, _groups(-(-ranks // pieces), micros), pieces, lead=2)


def seqsmartvpp(ranks: int, chunks: int, micros: int, pieces: int) -> Schedule:
    """``seqvpp`` with a lead of one: it holds least, and waits for every transfer."""
    return _order(ranks, chunks, _groups(-(-ranks // pieces), micros), pieces, lead=1)


def _groups(size: int, micros: int) -> list[range]:
    """Groups of ``size`` micro batches; the remainder is spread over the first ones, one each.

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
    """``warm`` forwards, then one forward and one backward in turn, then the backwards that are left.

    Backwards take the micro batches in the order they came, of one micro batch the newest piece first: a
    later piece leaves gradients for what it read of an earlier one.
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
