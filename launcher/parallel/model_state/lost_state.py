"""Refuses Python state that a forward changes where another stage or a later step would not see it."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.python_state import Key, PythonState, changed
from launcher.plan.partition.stages import covers


def counters(
    before: PythonState, after: PythonState, leaves: frozenset[str], copies: Iterable[Key]
) -> list[str]:
    """The attributes in ``leaves`` that a forward changes; ``copies``: those that changed in a leaf's copy.

    Raises ``RequestError`` for others, and for what several leaves hold.
    """
    out: dict[str, None] = {}
    for key in (*changed(before, after), *copies):
        # everything that one sees it by, and the leaves that these are in
        names = after.names(key) if key in after.marks else before.names(key)
        owners = {n: next((u for u in leaves if covers(u, n)), None) for n in names}

        # of which there is one, so that its stage sees the change
        lost = [n for n, leaf in owners.items() if leaf is None]
        if lost:
            text = f"the forward changes {lost[0]}, which is on no stage"
            why = "no other stage and no later step would see it"
            raise RequestError((Problem("model", f"{text}: {why}; keep it in a module that has a stage"),))
        if len(set(owners.values())) > 1:
            text = f"the forward changes {names[0]}, which is also {' and '.join(names[1:])}, in Python"
            cure = "give each its own, or hand on a tensor"
            raise RequestError((Problem("model", f"{text}: another stage would not see it; {cure}"),))
        out |= dict.fromkeys(names)
    return [*out]
