"""A model in training, with all objects that a rank uses to train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from launcher.optional import drill
from launcher.parallel.grad_norm import Norm
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.plan import Plan
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.runtime.cluster.world import World
from launcher.runtime.training.averaging import WeightAverage
from launcher.runtime.training.batches import Feed
from launcher.runtime.training.callbacks import Callbacks
from launcher.runtime.training.changes_between_steps import ChangesBetweenSteps
from launcher.runtime.training.compile_timeout import CompileTimeout
from launcher.runtime.training.late_state import LateState
from launcher.runtime.training.loss_scaling import Scaling
from launcher.runtime.training.metrics_file import LocalNormLog
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.runtime.training.profiler import ProfileWindow
from launcher.runtime.training.save_thread import Saver
from launcher.runtime.training.throughput import DeviceFigures, RankTimes


@dataclass
class Session:
    """The objects with which a rank trains, and its progress: ``step`` counts finished optimizer steps.

    ``emit`` reports text for the console and rows of metrics. ``saver`` writes checkpoints while training
    continues; ``None``: training waits for them. ``trust.key`` names the key with which checkpoints are
    encrypted; ``None``: they are not. ``on_stop`` saves the session when all ranks have agreed to stop, and
    returns the checkpoint's name. ``resumed``: the weights are from a checkpoint, which may have been saved
    before a validation that was due. ``stopping``: at the last step, a rank had been asked to stop.
    ``spare``: training continues if a checkpoint cannot be written; ``unsaved`` counts such checkpoints.
    ``settings``: those of the training, which checkpoints record. ``training``: an identifier that its
    checkpoints share, also after a resume; ``None`` if an older version wrote them. ``passed``: the steps
    that were trained before an older checkpoint was loaded. ``loaded``: the source of each ``load`` that
    these weights come after, by the name of the step; checkpoints record it. ``None`` if an older version
    wrote the checkpoint. ``at``: the name of the step that runs; checkpoints record it. ``writing``: the last
    checkpoint, until callbacks are notified of it. ``baseline``: the loss on held-out samples of the best
    model that ignores its input, if the data defines it. ``measured``: the metrics of the last step that was
    measured. ``times``: measures ranks, if there are several; ``by_rank``: its figures. ``drill``: a fault
    that this run rehearses. ``profile``: the profiler of this rank, if it is profiled. ``between``: examines
    what callbacks and the schedule change between steps; ``None`` if they are not the user's.
    """

    world: World
    plan: Plan
    folder: Path
    model: ParallelModel
    pipeline: PipelineRuntime
    optimizer: torch.optim.Optimizer
    norm: Norm
    feed: Feed
    emit: Callable[[dict[str, Any]], None]
    figures: DeviceFigures
    baseline: float | None = None
    local_norm: LocalNormLog | None = None
    average: WeightAverage | None = None
    saver: Saver | None = None
    drill: drill.RankDrill | None = None
    profile: ProfileWindow | None = None
    times: RankTimes | None = None
    trust: Trust = ANYONE
    on_stop: Callable[[], str | None] = lambda: None
    stopping: bool = False
    resumed: bool = False
    callbacks: Callbacks | None = None
    writing: Path | None = None
    spare: bool = False
    unsaved: int = 0
    step: int = 0
    training: str | None = field(default_factory=partial(token_hex, 8))
    passed: int = 0
    loaded: dict[str, str] | None = field(default_factory=dict)
    at: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    scaling: Scaling = field(default_factory=lambda: Scaling(1.0, dynamic=False))
    results: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    by_rank: dict[str, float] = field(default_factory=dict)
    compile_timeout: CompileTimeout = field(default_factory=lambda: CompileTimeout(None))
    late_state: LateState = field(default_factory=LateState)
    between: ChangesBetweenSteps | None = None
