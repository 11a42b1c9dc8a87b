"""Calls the user's callbacks during a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from launcher.errors import RunError
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.torch_distributed_reads import world_reads
from launcher.plan.values.module_names import listed
from launcher.runtime.device import forked_streams
from launcher.runtime.training.changes_between_steps import EVERY_RANK, ChangesBetweenSteps, NotSeenByAll
from launcher.runtime.training.late_state import Digests, attribute_digests, changed
from launcher.user_errors import user_error


@dataclass(frozen=True)
class TrainingEvent:
    """What a callback receives, read-only.

    ``step``: the number of finished optimizer steps, out of ``steps``. ``loss`` and ``lr``: those of the last
    step since this start, ``None`` before it. ``metrics``: for ``on_step`` its loss, lr and grad_norm, for
    ``on_eval`` the results of the validation, otherwise all results so far. ``folder``: the run folder.
    ``checkpoint``: for ``on_save`` the complete checkpoint.
    """

    step: int
    steps: int
    loss: float | None
    lr: float | None
    metrics: Mapping[str, float]
    folder: Path
    rank: int
    checkpoint: Path | None = None


COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "batch_isend_irecv", "broadcast", "gather", "irecv",
    "isend", "monitored_barrier", "new_group", "new_subgroups", "recv", "reduce", "scatter", "send",
    "split_group",
)  # fmt: skip
"""Beginnings of the names of functions of ``torch.distributed`` that wait for other ranks."""


class CallsCollective(RunError):
    """A callback of one rank calls a collective, for which the other ranks would not come."""


@contextmanager
def collectives_refused(cls: object, name: str) -> Iterator[None]:
    """Refuses collectives in the block, which runs code of ``cls``, unless each rank has an instance.

    ``name`` is that of the class or hook. Raises ``CallsCollective``.
    """
    if getattr(cls, EVERY_RANK, False) is True or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    errors: list[CallsCollective] = []

    def report(query: str) -> None:
        if query.rpartition(".")[2].startswith(COLLECTIVES):
            text = f"{name} calls {query}, but it runs on rank 0 only, which would wait for the others"
            cure = f"set {EVERY_RANK} = True in the class: then each rank creates it and calls its hooks"
            errors.append(CallsCollective(f"{text}; {cure}"))
            raise errors[0]

    with world_reads(report):
        yield
    if errors:  # the class has caught it
        raise errors[0]


@dataclass
class Callbacks:
    """The callbacks of one rank, ``each`` with its name in errors; some ranks may have none.

    If the job has callbacks, every rank has this object, as ``agreed`` is a collective. Random numbers that
    they draw do not advance the streams of the training on ``device``: a callback runs on one rank, ranks of
    ``tp`` draw the same numbers, and a resumed run calls ``on_start`` again. ``between`` examines what their
    hooks change.
    """

    each: Sequence[tuple[str, object]]
    steps: int
    folder: Path
    rank: int
    device: torch.device
    between: ChangesBetweenSteps | None = None
    stop_requested: bool = False
    _last: dict[str, float] = field(default_factory=dict)
    _first: list[Digests] = field(init=False)
    _noted: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._first = [attribute_digests(one) for _, one in self.each]

    def call(
        self, hook: str, step: int, metrics: Mapping[str, float], checkpoint: Path | None = None
    ) -> None:
        """Calls ``hook`` of all callbacks that have it, in order.

        Sets ``stop_requested`` if one returns True. Raises ``RunError`` if a callback fails, or
        changes what only its own rank would train with.
        """
        if hook == "on_step":
            self._last = dict(metrics)
        frozen_metrics = MappingProxyType(dict(metrics))
        event = TrainingEvent(
            step=step,
            steps=self.steps,
            loss=self._last.get("loss"),
            lr=self._last.get("lr"),
            metrics=frozen_metrics,
            folder=self.folder,
            rank=self.rank,
            checkpoint=checkpoint,
        )
        for name, one in self.each:
            act = getattr(one, hook, None)
            if act is None:
                continue
            everywhere = getattr(type(one), EVERY_RANK, False) is True
            compared = self.between.compared(f"{name}.{hook}", everywhere) if self.between else nullcontext()
            try:
                with (
                    compared,
                    streams_kept(),
                    forked_streams(self.device),
                    collectives_refused(type(one), f"{name}.{hook}"),
                ):
                    answer = act(event)
            except (CallsCollective, NotSeenByAll):
                raise
            except (Exception, SystemExit) as error:  # user code may raise anything
                raise RunError(f"{name}.{hook} failed after step {step}: {user_error(error)}") from error
            self.stop_requested |= answer is True

    def unsaved(self) -> list[str]:
        """Returns notes on attributes that the callbacks have changed, each attribute once."""
        out = []
        for (name, one), first in zip(self.each, self._first, strict=True):
            names = [n for n in changed(first, attribute_digests(one)) if (name, n) not in self._noted]
            if names:
                text = f"{name} has changed {listed(names)}; no checkpoint contains it"
                cure = "if that matters, write it to a file in event.folder and read it in on_start"
                out.append(f"{text}, so a resumed run resets it; {cure}")
                self._noted.update((name, n) for n in names)
        return out

    def agreed(self) -> bool:
        """Returns true if a callback of any rank has asked to stop. Every rank calls it."""
        requests = torch.tensor(self.stop_requested, dtype=torch.int32)
        dist.all_reduce(requests)
        return bool(requests.item())
