"""A model in training on one rank: all that a step of the request works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from launcher.parallel.norms.grad_norm import Norm
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.plan import Plan
from launcher.plan.values.trust import ANYONE, Trust
from launcher.runtime.cluster.world import World
from launcher.runtime.drill.rank_drill import RankDrill
from launcher.runtime.rank_times import RankTimes
from launcher.runtime.training.batches import Feed
from launcher.runtime.training.callbacks import Callbacks
from launcher.runtime.training.device_figures import DeviceFigures
from launcher.runtime.training.ema import WeightAverage
from launcher.runtime.training.first_step import FirstStep
from launcher.runtime.training.grad_norm_log import LocalNormLog
from launcher.runtime.training.loss_scaling import Scaling
from launcher.runtime.training.pipeline import Pipeline
from launcher.runtime.training.profiler import ProfileWindow
from launcher.runtime.training.save_thread import Saver


@dataclass
class Session:
    """What a rank trains with, and how far it is: ``step`` counts the optimizer steps the weights have seen.

    ``emit`` takes news for the console and the metrics. ``saver`` writes checkpoints while training goes
    on; ``None``: training waits for them. ``trust.key`` says where the key is that checkpoints are
    encrypted with; ``None``: they are not. ``on_stop`` saves what the session has learned when all ranks
    have agreed to stop, and says in which checkpoint; ``resumed``: the weights are those of a checkpoint,
    which may have been saved in front of a validation; ``told``: some rank had been asked to stop when the
    last step was taken. ``spare``: training goes on without a checkpoint that cannot be written;
    ``unsaved`` counts those. ``settings``: what its checkpoints say that they were trained with.
    ``training``: the name that its checkpoints share, after a resume too; ``None``: an older version's.
    ``passed``: the steps that were trained before an older checkpoint was loaded.
    ``writing``: a checkpoint that no callback has been told of.
    ``baseline`` is the loss on held-out samples of the best model that ignores its input, where the data
    knows it. ``measured``: what the metrics of the last step that was measured come to. ``times``: of ranks,
    where there are several, and ``by_rank`` what they come to; ``drill``: a fault that this run rehearses.
    ``profile``: of this rank, if it is profiled.
    """

    world: World
    plan: Plan
    folder: Path
    model: ParallelModel
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    norm: Norm
    feed: Feed
    emit: Callable[[dict[str, Any]], None]
    figures: DeviceFigures
    baseline: float | None = None
    local_norm: LocalNormLog | None = None
    average: WeightAverage | None = None
    saver: Saver | None = None
    drill: RankDrill | None = None
    profile: ProfileWindow | None = None
    times: RankTimes | None = None
    trust: Trust = ANYONE
    on_stop: Callable[[], str | None] = lambda: None
    told: bool = False
    resumed: bool = False
    callbacks: Callbacks | None = None
    writing: Path | None = None
    spare: bool = False
    unsaved: int = 0
    step: int = 0
    training: str | None = field(default_factory=partial(token_hex, 8))
    passed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    scaling: Scaling = field(default_factory=lambda: Scaling(1.0, dynamic=False))
    results: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    by_rank: dict[str, float] = field(default_factory=dict)
    first_step: FirstStep = field(default_factory=lambda: FirstStep(None))
