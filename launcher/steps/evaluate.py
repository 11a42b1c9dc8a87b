"""``evaluate``: the loss on held-out samples, of the live model or of a file in one process."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate
from launcher.runtime.training import loop
from launcher.runtime.training.session import Session
from launcher.steps import export, transform
from launcher.steps.files.run_files import RunFiles
from launcher.steps.model import single_process


def run_on_ranks(step: Evaluate, session: Session, job: Job) -> str:
    loss = loop.validate(session, step.batches)
    if session.world.rank == 0:
        said = f"evaluate: validation loss {loss:.4f} after {session.step} steps"
        if session.baseline is not None:
            baseline = session.baseline * session.plan.loss_terms
            session.results["baseline"] = baseline
            said += f"; the best guess without context (unigram entropy) has {baseline:.4f}"
        session.emit({"text": said})
    return ""


def run_on_files(step: Evaluate, run: RunFiles) -> dict[str, float]:
    """Of what an ``export`` or a ``transform`` of the run has written."""
    if step.of == "exported":
        model = export.exported(run)
    else:
        path = transform.transformed(run)
        assert path is not None, "the planner wants a transform before what reads its result"
        model = single_process.from_checkpoint(run.job, path)
    loss = single_process.held_out_loss(model, run.job, step.batches, run.plan.loss_terms)
    run.say(f"evaluate: validation loss {loss:.4f} of the {step.of} model in one process")
    return {f"{step.of}_loss": loss}
