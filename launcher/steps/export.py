"""``export``: a checkpoint's whole tensors, as a file or a Hugging Face folder, tried in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.atomic_folder import check_apart
from launcher.checkpoint.export import check_file, export
from launcher.checkpoint.foreign.hf_write import (
    check_beside,
    check_folder,
    size_in_bytes,
    to_theirs,
    write_hf,
)
from launcher.checkpoint.foreign.rename import renamed
from launcher.checkpoint.foreign.rename_tables import from_ours
from launcher.checkpoint.layout.derived import of_plan, sources
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.manifest_mac import unvouched
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.transform import Report
from launcher.errors import Problem, RunError
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export, Transform
from launcher.plan.plan import Plan
from launcher.plan.settings.checkpoint import AVERAGED
from launcher.plan.values.text import bytes_text, many
from launcher.plan.values.trust import Trust
from launcher.plan.verbs import EXPORTED
from launcher.steps import transform
from launcher.steps.files.checks import FileChecks
from launcher.steps.files.hf_folder import settled, texts, told
from launcher.steps.files.run_files import RunFiles

if TYPE_CHECKING:
    from torch import Tensor


def check(step: Export, at: FileChecks) -> list[Problem]:
    step = settled(step, at.job)
    found = [*_own_problems(step, at)]
    if not found and step.src is not None and at.here(step.src):
        src = Path(step.src)
        found += at.problems(
            "names", lambda: check_names(step, step.src, open_checkpoint(src, at.trust).strategy)
        )
        found += at.problems("src", lambda: check_source(step, src, at.trust))
    return [*found, *at.unwritable("path", step.path)]


def _own_problems(step: Export, at: FileChecks) -> Iterator[Problem]:
    """Of each setting by itself."""
    yield from at.problems("names", lambda: renamed((), from_ours(step.names)))
    yield from at.problems("max_shard_size", lambda: size_in_bytes(step.max_shard_size))
    if not at.later(step.path):
        yield from at.problems("path", lambda: check_place(step, at.job))
    along = [Path(p) for p in step.beside if not at.later(p)]
    yield from at.problems("beside", lambda: check_beside(along))
    if step.src is not None and at.here(step.src):
        src = Path(step.src)
        yield from at.problems("src", lambda: open_checkpoint(src, at.trust))


def fits(step: Export, at: FileChecks, plan: Plan) -> list[Problem]:
    """Names that leave no place for what the run has; not of what a transform brings from elsewhere."""
    elsewhere = any(isinstance(s, Transform) and s.src is not None for s in at.job.steps.values())
    if at.shown or elsewhere or step.src is not None:
        return []
    step = settled(step, at.job)
    return at.problems("names", lambda: check_names(step, "the run", of_plan(plan)))


def run_on_files(step: Export, run: RunFiles) -> dict[str, float]:
    """Returns the loss of what was written, where it is checked."""
    step, path = settled(step, run.job), written(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _write(step, source(step, run), path, run.trust, texts(step, run.job, run.plan.dtypes.kept))
    files = f" in {many(done.files, 'file')}" if step.format == "hf" else ""
    clear = ", not encrypted" if run.job.checkpoint.encrypt is not None else ""
    doubt = unvouched(source(step, run), run.trust)
    run.say(f"export: {path}, {bytes_text(done.bytes_written)}{files}{clear}{doubt}")
    return _compared(step, run) if step.check else {}


def _compared(step: Export, run: RunFiles) -> dict[str, float]:
    """The loss of what was written, and how far it is from the run's.

    Raises ``RunError`` when that is too far.
    """
    from launcher.steps.model import single_process

    job, before, terms = run.job, run.figures, run.plan.loss_terms
    loss = single_process.held_out_loss(single_process.of(job, read(run)), job, _batches(job), terms)
    of = AVERAGED if step.weights == "ema" else ""
    if f"val_loss{of}" not in before or before.get(f"val_step{of}") != before.get("saved_step"):
        alone = "no 'evaluate' of these weights to compare with"
        run.say(f"export: validation loss {loss:.6f} in one process ({alone})")
        return {"exported_loss": loss}

    was = before[f"val_loss{of}"]
    gap = abs(loss - was)
    allowed = step.tolerance * terms
    if not gap <= allowed:
        text = f"export: {written(run)} has validation loss {loss:.8f}, the run had {was:.8f}"
        raise RunError(f"{text}: {gap:.1e} apart, allowed {allowed:.0e} (steps.export.tolerance)")
    run.say(f"export: validation loss {loss:.6f} in one process, {gap:.1e} from the run's")
    return {"exported_loss": loss, "export_gap": gap}


def written(run: RunFiles) -> Path:
    """Where this step writes: each has a place of its own."""
    step, other = _step(run), run.suffix(EXPORTED)
    if step.path:
        return Path(step.path)
    return run.folder / "exports" / (f"hf{other}" if step.format == "hf" else f"model{other}.safetensors")


def source(step: Export, run: RunFiles) -> Path:
    """What it names, else that of a transform before it, else the run's own last checkpoint."""
    if step.src is not None:
        return run.source(step.src)
    return transform.transformed(run) or run.last()


def check_place(step: Export, job: Job) -> None:
    """Raises as ``run_on_files`` does for a destination that is named. Writes nothing."""
    if step.path is not None and step.format != "hf":
        check_file(Path(step.path))
    if step.path is not None and step.format == "hf":
        along = (*map(Path, step.beside), *map(Path, told(step, job)))
        check_folder(Path(step.path), along, step.overwrite)


def check_source(step: Export, src: Path, trusted: Trust) -> None:
    """Raises as ``run_on_files`` does for what the heads of the files in ``src`` tell. Writes nothing."""
    if step.path is not None and step.format == "hf":
        check_apart(src, Path(step.path))
    reader = Reader(open_checkpoint(src, trusted))
    sources(src, reader.checkpoint.strategy, step.weights == "ema")
    reader.check_headers()


def check_names(step: Export, src: object, strategy: Strategy) -> None:
    """Raises as ``run_on_files`` does for what the table of names makes of the tensors of ``strategy``."""
    if step.format == "hf":
        to_theirs(src, strategy.only("param", "buffer").entries, from_ours(step.names))


def exported(run: RunFiles) -> Mapping[str, Tensor]:
    """What the last ``export`` before this step has written."""
    made = run.maker(EXPORTED)
    assert made is not None, "the planner wants an export before what reads one"
    return read(replace(run, name=made[0]))


def read(run: RunFiles) -> Mapping[str, Tensor]:
    """What this step has written, by our names, as the library of the format reads it: the writer is ours."""
    from safetensors.torch import load_file

    step, path = _step(run), written(run)
    if step.format != "hf":
        return load_file(path)
    ours = open_checkpoint(source(step, run), run.trust).strategy.only("param", "buffer").entries
    back = {theirs: name for name, theirs in renamed(ours, from_ours(step.names)).names.items()}
    return {
        back[name]: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()
    }


def _step(run: RunFiles) -> Export:
    step = run.job.steps[run.name]
    assert isinstance(step, Export)
    return settled(step, run.job)


def _write(step: Export, src: Path, path: Path, trusted: Trust, along: Mapping[str, str]) -> Report:
    averaged = step.weights == "ema"
    if step.format != "hf":
        return export(src, path, trusted, averaged)
    own = step.path is None  # a folder of this run, which a second start may write again
    return write_hf(
        src,
        path,
        names=from_ours(step.names),
        max_shard_size=step.max_shard_size,
        overwrite=step.overwrite or own,
        beside=tuple(map(Path, step.beside)),
        texts=along,
        trust=trusted,
        averaged=averaged,
    )


def _batches(job: Job) -> int | None:
    """What the run's own last evaluation read."""
    return next(
        (s.batches for s in reversed(job.steps.values()) if isinstance(s, Evaluate) and s.of == "run"), None
    )
