"""The steps that run in one process with a whole model, and those on files, in the order of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint import merge_pipeline_strategies
from launcher.checkpoint.export import export
from launcher.errors import RunError
from launcher.job.schema import Job
from launcher.job.steps import Evaluate, Export, Sample, Transform
from launcher.plan.memory import bytes_text
from launcher.steps import transform
from launcher.steps.paths import Paths

Say = Callable[[str], None]


def run(names: tuple[str, ...], job: Job, folder: Path, results: Mapping[str, float], say: Say) -> dict[str, Any]:
    """Carry out ``names``; ``results`` are the figures of the steps before. Returns new figures."""
    paths, out = Paths(folder, job), dict[str, Any]()
    for name in names:
        try:
            out |= _step(name, job, paths, {**results, **out}, say)
        except (ValueError, OSError) as error:
            raise RunError(f"{name}: {error}") from error
    return out


def _step(name: str, job: Job, paths: Paths, before: Mapping[str, float], say: Say) -> dict[str, float]:
    step = job.steps[name]
    if isinstance(step, Export):
        return _export(step, job, paths, before, say)
    if isinstance(step, Evaluate):
        return _evaluate(step, job, paths, say)
    if isinstance(step, Transform):
        _transform(step, paths, say)
    elif isinstance(step, Sample):
        from launcher.steps import sample

        say(f"sample:\n{sample.run(job, step, paths.exported())}")
    else:
        assert step.kind == "merge_strategies", f"{name} does not run alone"
        source, merged = paths.last() / "strategy", paths.strategy / "merged.json"
        merge_pipeline_strategies(source, merged)
        say(f"merge_strategies: {len(list(source.glob('*.json')))} stages -> {merged}")
    return {}


def _transform(step: Transform, paths: Paths, say: Say) -> None:
    src = Path(step.src) if step.src else paths.last()
    own = step.dst is None  # a folder of this run, which a second start may write again
    done = transform.run(step.model_copy(update={"overwrite": step.overwrite or own}), src, paths.transformed())
    ranks = f"{step.nproc} rank{'s' if step.nproc > 1 else ''}"
    say(f"transform: {src.name} -> {ranks}, {bytes_text(done.bytes_written)}, {done.path}")


def _export(step: Export, job: Job, paths: Paths, before: Mapping[str, float], say: Say) -> dict[str, float]:
    path = paths.exported()
    path.parent.mkdir(parents=True, exist_ok=True)
    done = export(paths.export_source(step), path)
    say(f"export: {path}, {bytes_text(done.bytes_written)}")
    if not step.check:
        return {}
    from launcher.steps import evaluate, whole

    loss = evaluate.alone(whole.from_export(job, path), job, _batches(job))
    if "val_loss" not in before or before.get("val_step") != before.get("saved_step"):
        say(f"export: validation loss {loss:.6f} in one process (no 'evaluate' of these weights to compare with)")
        return {"exported_loss": loss}
    gap = abs(loss - before["val_loss"])
    if not gap <= step.tolerance:
        text = f"export: {path} has validation loss {loss:.8f}, the run had {before['val_loss']:.8f}"
        raise RunError(f"{text}: {gap:.1e} apart, allowed {step.tolerance:.0e} (steps.export.tolerance)")
    say(f"export: validation loss {loss:.6f} in one process, {gap:.1e} from the run's")
    return {"exported_loss": loss, "export_gap": gap}


def _evaluate(step: Evaluate, job: Job, paths: Paths, say: Say) -> dict[str, float]:
    from launcher.steps import evaluate, whole

    if step.of == "exported":
        model = whole.from_export(job, paths.exported())
    else:
        model = whole.from_checkpoint(job, paths.transformed())
    loss = evaluate.alone(model, job, step.batches)
    say(f"evaluate: validation loss {loss:.4f} of the {step.of} model in one process")
    return {f"{step.of}_loss": loss}


def _batches(job: Job) -> int | None:
    """What the run's own last evaluation read."""
    return next((s.batches for s in reversed(job.steps.values()) if isinstance(s, Evaluate) and s.of == "run"), None)
