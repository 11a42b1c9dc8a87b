"""``evaluate``: the loss on held-out samples, for the model in training or for a file in one process."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate
from launcher.plan.resolve.checkpoint import AVERAGED
from launcher.runtime.training import loop
from launcher.runtime.training.session import Session
from launcher.steps import export, transform
from launcher.steps.file_checks import RunFiles
from launcher.steps.model import evaluate_in_one_process, weights_in_one_process


def run_on_ranks(step: Evaluate, session: Session, job: Job) -> str:
    loss, of = _validated(step, session)
    if session.world.rank == 0:
        suffix = AVERAGED if of else ""
        names = {m.name: f"val_{m.name}{suffix}" for m in session.pipeline.metrics}
        metrics = {n: session.results[key] for n, key in names.items() if key in session.results}
        text = (
            f"evaluate: validation {_figures_text({'loss': loss} | metrics)}{of} after {session.step} steps"
        )
        if session.baseline is not None:
            baseline = session.baseline * session.plan.loss_terms
            session.results["baseline"] = baseline
            text += f"; the loss of the best guess without context (unigram entropy) is {baseline:.4f}"
        session.emit({"text": text})
    return ""


def _validated(step: Evaluate, session: Session) -> tuple[float, str]:
    """Returns the loss, and a text that names the weights."""
    if step.weights == "trained":
        return loop.validate(session, step.batches), ""
    assert session.average is not None, "the planner refuses to read an average that nobody keeps"
    with session.average.in_place():
        return loop.validate(session, step.batches, suffix=AVERAGED), " of the moving average of the weights"


def run_on_files(step: Evaluate, run: RunFiles) -> dict[str, float]:
    """Evaluates the model that an ``export`` or a ``transform`` of the run has written."""
    if step.of == "exported":
        model = export.exported(run)
    else:
        path = transform.transformed(run)
        assert path is not None, "the planner requires a transform before a step that reads its result"
        model = weights_in_one_process.from_checkpoint(run.job, path)
    losses = evaluate_in_one_process.held_out(model, run.job, step.batches, run.plan.loss_terms)
    figures = _figures_text(losses)
    run.say(f"evaluate: validation {figures} of the {step.of} model in one process")
    return {f"{step.of}_{name}": value for name, value in losses.items()}


def _figures_text(figures: Mapping[str, float]) -> str:
    """
    >>> _figures_text({"loss": 2.5, "accuracy": 0.25})
    'loss 2.5000, accuracy 0.2500'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
