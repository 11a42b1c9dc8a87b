"""Refuses Python state that a forward changes if another stage or a later step would not see the change."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.python_state import Key, PythonState, changed
from launcher.plan.partition.stages import covers


def counters(
    before: PythonState, after: PythonState, leaves: frozenset[str], copies: Iterable[Key]
) -> list[str]:
    """Return the attributes in ``leaves`` that a forward changes.

    ``copies`` has those that changed in a leaf's copy. Raises ``RequestError`` for attributes outside of
    ``leaves``, and for objects that several leaves share.
    """
    out: dict[str, None] = {}
    for key in (*changed(before, after), *copies):
        # all names of the object, and the leaves that contain them
        names = after.names(key) if key in after.marks else before.names(key)
        owners = {n: next((u for u in leaves if covers(u, n)), None) for n in names}

        # there must be exactly one leaf, whose stage sees the change
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
