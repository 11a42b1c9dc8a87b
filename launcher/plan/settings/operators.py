"""``parallel.operators``: the size of the tp axis that the strategies of operators imply."""

from __future__ import annotations

from launcher.errors import Problem
from launcher.job.schema.components import LanguageModel
from launcher.job.schema.job import Job
from launcher.plan.operators import strategy
from launcher.plan.partition.sizes import Note

KEY = "parallel.operators"
TP = "parallel.grid.tp"
SEARCHED = "parallel.mode=recursive_programming"


def degree(job: Job, notes: list[Note], found: list[Problem]) -> int:
    """Returns the size of tp: as requested, or as the slices of the operators imply; 1 if neither says it."""
    asked, operators = job.parallel.grid.tp, job.parallel.operators
    said, clash = strategy.degree(operators)

    # contradictions among the operators, a missing size of tp, and a contradiction between both
    if clash:
        found.append(Problem(KEY, f"cuts over tp into different numbers of slices: {clash}"))
    elif operators and asked is None and said is None:
        text = f"null: {KEY} names the axis tp, and nothing says how many ranks it has"
        found.append(Problem(TP, text, f"{TP}=2"))
    elif asked is not None and said not in (None, asked):
        found.append(Problem(TP, f"{asked}: {KEY} cuts into {said} slices", f"{TP}={said}"))

    # one follows from the other, or has no effect
    elif asked is None and said is not None:
        notes.append(Note(TP, f"null -> {said}: the slices of {KEY}"))
    elif asked == 1 and operators:
        notes.append(Note(KEY, "has no effect: tp has one rank"))
    elif (asked or 1) > 1 and not operators and job.parallel.param_strategy.load is None:
        text = f"{asked}: {KEY} cuts nothing over tp"
        if isinstance(job.model, LanguageModel):
            cure = "operators=megatron"
        else:
            cure = SEARCHED
            text += f"; it names how each operator is cut, or {SEARCHED} finds that for any model"
        found.append(Problem(TP, text, cure))
    return asked or said or 1
