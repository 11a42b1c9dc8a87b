"""The callbacks of a rank."""

from __future__ import annotations

from pathlib import Path

import torch

from launcher.errors import RequestError, RunError
from launcher.job import targets
from launcher.job.schema.job import Job
from launcher.job.schema.user_class import Target
from launcher.parallel.trace.python_streams import streams_kept
from launcher.runtime.cluster.world import World
from launcher.runtime.device import forked_streams
from launcher.runtime.training.callbacks import Callbacks, CallsCollective, collectives_refused
from launcher.runtime.training.changes_between_steps import EVERY_RANK, ChangesBetweenSteps
from launcher.user_errors import user_error


def build_callbacks(
    job: Job, steps: int, world: World, folder: Path, between: ChangesBetweenSteps | None
) -> Callbacks | None:
    """Returns the callbacks of this rank. Raises ``RunError`` if one cannot be constructed.

    ``between`` examines what their hooks change.
    """
    if not job.callbacks:
        return None
    device = torch.device(world.device)
    with streams_kept(), forked_streams(device):  # as around their hooks
        each = [
            (f"callbacks.{i} {target.target}", _built(target, i, job.security.allow))
            for i, target in enumerate(job.callbacks)
            if world.rank == 0 or _everywhere(target, i, job.security.allow)
        ]
    return Callbacks(each, steps=steps, folder=folder, rank=world.rank, device=device, between=between)


def _everywhere(target: Target, i: int, allow: tuple[str, ...]) -> bool:
    cls = targets.locate(target.target, allow, object, key=f"callbacks.{i}._target_")
    return getattr(cls, EVERY_RANK, False) is True


def _built(target: Target, i: int, allow: tuple[str, ...]) -> object:
    try:
        cls = targets.locate(target.target, allow, object, key=f"callbacks.{i}._target_")
        with collectives_refused(cls, f"callbacks.{i} {target.target}"):
            return targets.build(target, allow, object, key=f"callbacks.{i}._target_")
    except CallsCollective:
        raise
    except RequestError as error:
        raise RunError(str(error)) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise RunError(f"callbacks.{i} {target.target} cannot be built: {user_error(error)}") from error
