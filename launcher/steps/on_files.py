"""The steps that run in one process with a whole model, and those on files, in the order of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.checkpoint.manifest_mac import unvouched
from launcher.checkpoint.transform import is_checkpoint
from launcher.data.fallback import with_data_read
from launcher.errors import RunError, said
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export, Import, Inspect, MergeStrategies, Sample, Transform, Verify
from launcher.plan.changed_settings import recorded
from launcher.plan.plan import Plan
from launcher.plan.values.text import bytes_text, many
from launcher.plan.values.trust import trust
from launcher.steps import export, import_weights, merge_strategies, transform, verify
from launcher.steps.paths import Paths

if TYPE_CHECKING:
    from torch import Tensor

Say = Callable[[str], None]


def run(
    names: tuple[str, ...], job: Job, plan: Plan, folder: Path, results: Mapping[str, float], say: Say
) -> dict[str, Any]:
    """Carry out ``names``; ``results`` are the figures of the steps before. Returns new figures."""
    paths, out = Paths(folder, job), dict[str, Any]()
    for name in names:
        try:
            out |= _step(name, job, plan, paths, {**results, **out}, say)
        except (ValueError, OSError) as error:
            raise RunError(f"{name}: {said(error)}") from error
    return out


def _step(name: str, job: Job, plan: Plan, paths: Paths, before: Mapping[str, float], say: Say) -> dict[str, float]:
    step = job.steps[name]
    if isinstance(step, Export):
        return export.run(step, job, paths, before, say, plan.loss_terms)
    if isinstance(step, Evaluate):
        return _evaluate(step, job, paths, say, plan.loss_terms)
    if isinstance(step, Import):
        anew = job.checkpoint.resume == "never"
        settings = recorded(with_data_read(job), plan)
        return import_weights.run(
            name, step, plan, paths.checkpoints, say, anew=anew, known=trust(job), settings=settings
        )
    if isinstance(step, Transform):
        _transform(step, job, paths, say)
    elif isinstance(step, Verify):
        src = paths.source(step.src)
        say(f"verify: {verify.verified(src, trust(job))}{unvouched(src, trust(job))}")
    elif isinstance(step, Inspect):
        src = paths.source(step.src)
        say(f"inspect: {verify.inspected(src, trust(job))}")
        if doubt := unvouched(src, trust(job)):
            say(f"inspect: {src}{doubt}")
    elif isinstance(step, Sample):
        from launcher.steps import sample

        say(f"sample:\n{sample.run(job, step, _exported(job, paths))}")
    else:
        assert isinstance(step, MergeStrategies), f"{name} does not run alone"
        source = Path(step.src) if step.src else paths.last() / "strategy"
        merged = merge_strategies.target(step, paths.strategy, source)
        say(f"merge_strategies: {many(merge_strategies.run(step, source, merged), 'stage')} -> {merged}")
    return {}


def _transform(step: Transform, job: Job, paths: Paths, say: Say) -> None:
    src = paths.source(step.src)
    own = step.dst is None  # a folder of this run, which a second start may write again
    step = step.model_copy(update={"overwrite": step.overwrite or own})
    done = transform.run(step, src, paths.transformed(), job.checkpoint.encrypt, trust(job))
    ranks = step.strategy if step.strategy is not None else many(step.nproc, "rank")
    doubt = unvouched(src, trust(job)) if is_checkpoint(src) else ""
    files = "" if step.format == "launcher" else f" in .{step.format} files"
    clear = ", not encrypted" if files and job.checkpoint.encrypt is not None else ""
    say(f"transform: {src.name} -> {ranks}, {bytes_text(done.bytes_written)}{files}{clear}, {done.path}{doubt}")
    if done.left:
        say(f"transform: left out, for it is no tensor: {', '.join(done.left)}")


def _evaluate(step: Evaluate, job: Job, paths: Paths, say: Say, terms: int) -> dict[str, float]:
    from launcher.steps import evaluate
    from launcher.steps.model import single_process

    if step.of == "exported":
        model = single_process.of(job, _exported(job, paths))
    else:
        model = single_process.from_checkpoint(job, paths.transformed())
    loss = evaluate.alone(model, job, step.batches, terms)
    say(f"evaluate: validation loss {loss:.4f} of the {step.of} model in one process")
    return {f"{step.of}_loss": loss}


def _exported(job: Job, paths: Paths) -> Mapping[str, Tensor]:
    step = next(s for s in job.steps.values() if isinstance(s, Export))
    return export.read(step, paths)
