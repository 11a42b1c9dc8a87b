"""The planned fault of a drill, and the problems of drills that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.debug import NodeFault, RankFault, SlowRank
from launcher.job.schema.job import Job
from launcher.optional import lacking
from launcher.plan.sizes import Sizes
from launcher.plan.step_order import phases
from launcher.plan.values.text import many

WRITING = ("torn_write", "disk_full")
"""Kinds of faults that happen while the checkpoint of their step is written."""


@dataclass(frozen=True)
class DrillFault:
    """A fault of ``kind`` on ``ranks`` in ``step``, which counts from 1.

    ``ms``: for ``slow_rank``, the milliseconds that each of ``ranks`` sleeps in ``step`` and every later one.
    ``restarts``: all ranks have to be started again afterwards.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    ms: float = 0.0
    restarts: bool = True

    @property
    def done(self) -> int:
        """The number of optimizer steps that are complete when the fault happens."""
        return self.step if self.kind in WRITING else self.step - 1

    def __str__(self) -> str:
        """
        >>> print(DrillFault("kill_rank", (1,), 3))
        kill_rank of rank 1 in step 3
        >>> print(DrillFault("slow_rank", (1,), 3, ms=1000))
        slow_rank of rank 1 from step 3 on, 1000 ms a step
        """
        which = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        when = f"from step {self.step} on, {self.ms:g} ms a step" if self.ms else f"in step {self.step}"
        return f"{self.kind} of {which} {when}"


KEY = "debug.drill"


def fault(job: Job, sizes: Sizes) -> DrillFault | None:
    """Returns the fault that the ranks of the plan inject, or ``None``."""
    for kind, settings in _set(job).items():
        ms = settings.ms if isinstance(settings, SlowRank) else 0.0
        ranks: Sequence[int] = (
            (settings.rank,) if isinstance(settings, RankFault) else _of_node(settings, job, sizes)
        )
        return DrillFault(kind, tuple(ranks), settings.step, ms, restarts(job))
    return None


def _of_node(settings: NodeFault, job: Job, sizes: Sizes) -> Sequence[int]:
    each = sizes.grid.size // job.launch.nnodes
    return range(settings.node * each, (settings.node + 1) * each)


def restarts(job: Job) -> bool:
    """Returns true if the ranks have to be started again after the fault."""
    faults = _set(job)
    if "disk_full" in faults:
        return job.checkpoint.on_error == "stop"
    return bool(faults) and "slow_rank" not in faults


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields why the fault cannot happen, or why the run could not be resumed or compared afterwards."""
    if job.debug.drill is None or sizes is None:
        return
    if lacks := lacking("drill", "debug.drill"):
        yield from lacks
        return
    named = _set(job)
    if len(named) != 1:
        yield from _not_one(list(named))
        return
    ((kind, settings),) = named.items()
    yield from _nowhere(f"{KEY}.{kind}", settings, job, sizes)
    yield from _unsaved(kind, settings.step, job, sizes)
    if kind == "bitflip":
        yield from _no_other(settings.step, job)
    yield from _nothing_to_compare(job)


def _set(job: Job) -> dict[str, RankFault | NodeFault]:
    drill = job.debug.drill
    if drill is None:
        return {}
    faults: dict[str, RankFault | NodeFault | None] = {
        "kill_rank": drill.kill_rank,
        "hang_rank": drill.hang_rank,
        "slow_rank": drill.slow_rank,
        "torn_write": drill.torn_write,
        "bitflip": drill.bitflip,
        "disk_full": drill.disk_full,
        "lose_node": drill.lose_node,
    }
    return {kind: settings for kind, settings in faults.items() if settings is not None}


def _not_one(named: list[str]) -> Iterator[Problem]:
    if not named:
        yield Problem(KEY, "names no fault", f"{KEY}=null")
    else:
        text = f"{', '.join(named)}: a drill has one fault, so that everything that follows is caused by it"
        yield Problem(KEY, f"{text}; set all but one of them to null")


def _nowhere(key: str, settings: RankFault | NodeFault, job: Job, sizes: Sizes) -> Iterator[Problem]:
    """Yields the ranks, nodes or steps of the fault that do not exist."""
    if isinstance(settings, NodeFault):
        n = job.launch.nnodes
        if settings.node >= n:
            yield Problem(f"{key}.node", f"{settings.node}: launch.nnodes is {n}", f"{key}.node={n - 1}")
    elif settings.rank >= sizes.grid.size:
        n = sizes.grid.size
        yield Problem(
            f"{key}.rank", f"{settings.rank}: the plan has {many(n, 'rank')}", f"{key}.rank={n - 1}"
        )
    elif key.endswith("slow_rank") and sizes.grid.size == 1:
        yield Problem(key, "the plan has one rank, so no other rank waits for it")
    if settings.step > sizes.steps:
        text = f"{settings.step}: the training ends after {many(sizes.steps, 'step')}"
        yield Problem(f"{key}.step", text, f"{key}.step={sizes.steps}")


def _unsaved(kind: str, step: int, job: Job, sizes: Sizes) -> Iterator[Problem]:
    """Yields a problem if there is no checkpoint to resume from, or none is written in that step."""
    every = job.checkpoint.every
    if kind == "slow_rank" or step > sizes.steps:
        return
    if every is None:
        text = f"null: debug.drill.{kind} needs a checkpoint during training to resume from"
        yield Problem("checkpoint.every", text, f"checkpoint.every={_often(kind, step)}")
    elif kind in WRITING and (step % every or step >= sizes.steps):
        text = f"{step}: training writes no checkpoint in that step (checkpoint.every={every})"
        last = (sizes.steps - 1) // every * every
        near = min(max(every, round(step / every) * every), last)
        cure = f"{KEY}.{kind}.step={near}" if last else ""
        yield Problem(f"{KEY}.{kind}.step", text, cure)


def _often(kind: str, step: int) -> int:
    """Returns a ``checkpoint.every`` with which a fault in ``step`` loses work and leaves a checkpoint."""
    if kind == "bitflip":
        return max(1, (step - 1) // 2)
    return step if kind in WRITING else (step + 1) // 2


def _no_other(step: int, job: Job) -> Iterator[Problem]:
    """Yields a problem if no checkpoint precedes the newest one, which ``bitflip`` damages."""
    every = job.checkpoint.every
    if job.checkpoint.keep == 1:
        text = "1: bitflip damages the newest checkpoint, and there would be no other"
        yield Problem("checkpoint.keep", text, "checkpoint.keep=2")
    if every is not None and (step - 1) // every < 2:
        text = f"{step}: at that step there are fewer than two checkpoints (checkpoint.every={every})"
        yield Problem(f"{KEY}.bitflip.step", text, f"{KEY}.bitflip.step={2 * every + 1}")


def _nothing_to_compare(job: Job) -> Iterator[Problem]:
    """Yields a problem unless a save step after train writes the final weights, which a drill compares."""
    for phase in phases(job.steps):
        kinds = [job.steps[name].kind for name in phase.steps]
        if "train" in kinds and "save" in kinds[kinds.index("train") :]:
            return
    names = list(job.steps)
    trains = next((n for n, name in enumerate(names) if job.steps[name].kind == "train"), None)
    if trains is None:
        yield Problem(KEY, "no step trains, so no fault happens", f"{KEY}=null")
        return
    text = "no save step after train: a drill compares its saved weights with those of the undisturbed run"
    words = [*names[: trains + 1], "save", *(n for n in names[trains + 1 :] if n != "save")]
    yield Problem("steps", text, quote(f"steps=[{','.join(words)}]"))
