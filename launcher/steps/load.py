"""``load``: loads the weights of a checkpoint of any layout into that of the run."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.store import latest
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Load
from launcher.plan.values.text import bytes_text
from launcher.plan.verbs import reads_best
from launcher.runtime.training import checkpoint_tensors, save
from launcher.runtime.training.session import Session
from launcher.steps.file_checks import best


def run_on_ranks(step: Load, session: Session, job: Job) -> str:
    save.finish(session)  # a background save may be writing the checkpoint to load
    checkpoints = session.folder / "checkpoints"
    path = latest(checkpoints, session.trust)
    if step.path is not None:
        path = best(checkpoints, session.trust) if reads_best(step) else Path(step.path)
    assert path is not None, "the planner requires a save before a load without a path"

    session.passed = max(session.passed, session.step)
    checkpoint_tensors.load(session, path, broadcast=step.broadcast)

    read, kept = (bytes_text(int(session.results[f"load_bytes_{kind}"])) for kind in ("read", "held"))
    spared = "; the rest was broadcast, all digests agree" if step.broadcast else ""
    doubt = unvouched(path, session.trust)
    return f"loaded {path}, after {session.step} steps; ranks read {read} and hold {kept}{spared}{doubt}"
