"""The private parts of ``torch.distributed.pipelining`` that we use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from launcher.parallel.split_backward import Deferral
from launcher.plan.schedule.schedules import Action, Schedule
from launcher.runtime.torch_private.selftest import verify

verify()  # first, as its message explains more than a failed import below

from torch.distributed.pipelining import schedules as torch_schedules  # noqa: E402
from torch.distributed.pipelining.schedules import (  # noqa: E402
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from launcher.runtime.torch_private.reducing_stage import ReducingStage  # noqa: E402

KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}

_add_wait_send: Callable[[Any], Any] = getattr(torch_schedules, "_add_wait_send", lambda rows: rows)
"""Since torch 2.15 each send has an action that waits for it; before, the end of the step waits."""

Runtime = _PipelineScheduleRuntime


class ScheduleRuntime(_PipelineScheduleRuntime):
    """A schedule in which ``Prefetch`` and FSDP2's hooks decide when weights are gathered and resharded.

    torch would gather all weights of a stage before its first action, and reshard them if a rank has more
    than three stages.
    """

    def _prepare_schedule_with_comms(self, actions: Any, format: str = "compute_only") -> None:
        assert format == "compute_only", format
        super()._validate_and_set_stage_mapping(actions)
        self._lower(actions)

    def _lower(self, actions: Any) -> None:
        rows: dict[int, Any] = dict(actions)
        if self._has_backward:
            rows = {r: _add_reduce_grad(row, self._n_microbatches) for r, row in rows.items()}
        to_rank = self.stage_index_to_group_rank
        rows = _add_send_recv(rows, lambda s: to_rank[s], self._num_stages)
        self.pipeline_order_with_comms = _add_wait_send(rows)

    def _assert_unsharded(self, stage: Any) -> None:
        """Does nothing: a module waits for its weights when it is called."""


class ForwardRuntime(ScheduleRuntime):
    """A schedule without backwards, which torch's own validation would reject."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_backward = False

    def _prepare_schedule_with_comms(self, actions: Any, format: str = "compute_only") -> None:
        to_rank = {a.stage_index: r for r, row in actions.items() for a in row}
        self.stage_index_to_group_rank = to_rank
        for part in self._stages:
            part.stage_index_to_group_rank = to_rank
        self._lower(actions)


def runtime(
    stages: Sequence[ReducingStage], schedule: Schedule, micros: int, loss: Callable[..., Any]
) -> Runtime:
    """Returns torch's pipeline runtime for these actions; torch adds sends, receives and reductions."""
    kinds = {a.kind for row in schedule for a in row}
    runtime_class = ForwardRuntime if kinds <= {"F"} else ScheduleRuntime
    run = runtime_class(list(stages), micros, loss_fn=loss, scale_grads=False)

    # separate weight gradients
    if "I" in kinds:
        for part in stages:
            part.deferral = Deferral()

    rows: dict[int, list[_Action | None]] = {r: [_action(a) for a in row] for r, row in enumerate(schedule)}
    run._prepare_schedule_with_comms(rows, format="compute_only")
    return run


def _action(a: Action) -> _Action:
    return _Action(a.stage, KINDS[a.kind], a.micro)


def run(
    schedule: Runtime, inputs: list[tuple[torch.Tensor, ...]] | None, targets: list[torch.Tensor] | None
) -> None:
    """Runs one step, or one evaluation, of micro batches (or chunks) that are already split.

    Their sizes may differ.
    """
    for part in schedule._stages:
        part.has_backward = schedule._has_backward
        part.clear_runtime_states()
    schedule._step_microbatches(inputs, None, targets, None, False)
