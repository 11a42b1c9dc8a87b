"""``export``: a checkpoint with every tensor whole, as a file or a Hugging Face folder, tried out in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.atomic_folder import check_apart
from launcher.checkpoint.export import check_file, export
from launcher.checkpoint.foreign.hf_write import check_folder, to_theirs, write_hf
from launcher.checkpoint.foreign.rename import renamed
from launcher.checkpoint.foreign.rename_tables import from_ours
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.manifest_mac import unvouched
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.transform import Report
from launcher.errors import RunError
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export
from launcher.plan.values.text import bytes_text, many
from launcher.plan.values.trust import Trust, trust
from launcher.steps.paths import Paths

if TYPE_CHECKING:
    from torch import Tensor

Say = Callable[[str], None]


def run(
    step: Export, job: Job, paths: Paths, before: Mapping[str, float], say: Say, terms: int = 1
) -> dict[str, float]:
    """Returns the loss of what was written, where it is checked.

    ``before`` are the figures of the steps before; ``terms``: of how many means the loss is the sum.
    """
    path = paths.exported()
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _write(step, paths.export_source(step), path, trust(job))
    files = f" in {many(done.files, 'file')}" if step.format == "hf" else ""
    clear = ", not encrypted" if job.checkpoint.encrypt is not None else ""
    doubt = unvouched(paths.export_source(step), trust(job))
    say(f"export: {path}, {bytes_text(done.bytes_written)}{files}{clear}{doubt}")
    if not step.check:
        return {}
    from launcher.steps import evaluate
    from launcher.steps.model import single_process

    loss = evaluate.alone(single_process.of(job, read(step, paths)), job, _batches(job), terms)
    if "val_loss" not in before or before.get("val_step") != before.get("saved_step"):
        say(f"export: validation loss {loss:.6f} in one process (no 'evaluate' of these weights to compare with)")
        return {"exported_loss": loss}
    gap, allowed = abs(loss - before["val_loss"]), step.tolerance * terms
    if not gap <= allowed:
        text = f"export: {path} has validation loss {loss:.8f}, the run had {before['val_loss']:.8f}"
        raise RunError(f"{text}: {gap:.1e} apart, allowed {allowed:.0e} (steps.export.tolerance)")
    say(f"export: validation loss {loss:.6f} in one process, {gap:.1e} from the run's")
    return {"exported_loss": loss, "export_gap": gap}


def check_place(step: Export) -> None:
    """Raises as ``run`` does for a destination that is named. Writes nothing."""
    if step.path is not None and step.format == "safetensors":
        check_file(Path(step.path))
    if step.path is not None and step.format == "hf":
        check_folder(Path(step.path), tuple(map(Path, step.beside)), step.overwrite)


def check_source(step: Export, src: Path, trusted: Trust) -> None:
    """Raises as ``run`` does for what the heads of the files in ``src`` tell. Writes nothing."""
    if step.path is not None and step.format == "hf":
        check_apart(src, Path(step.path))
    Reader(open_checkpoint(src, trusted)).check_headers()


def check_names(step: Export, src: object, strategy: Strategy) -> None:
    """Raises as ``run`` does for what the table of names makes of the tensors of ``strategy``."""
    if step.format == "hf":
        to_theirs(src, strategy.only("param", "buffer").entries, from_ours(step.names))


def read(step: Export, paths: Paths) -> Mapping[str, Tensor]:
    """What the step has written, by our names, as the library of the format reads it: the writer is ours."""
    from safetensors.torch import load_file

    path = paths.exported()
    if step.format == "safetensors":
        return load_file(path)
    ours = open_checkpoint(paths.export_source(step), trust(paths.job)).strategy.only("param", "buffer").entries
    back = {theirs: name for name, theirs in renamed(ours, from_ours(step.names)).names.items()}
    return {back[name]: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def _write(step: Export, src: Path, path: Path, trusted: Trust) -> Report:
    if step.format == "safetensors":
        return export(src, path, trusted)
    own = step.path is None  # a folder of this run, which a second start may write again
    return write_hf(
        src,
        path,
        names=from_ours(step.names),
        max_shard_size=step.max_shard_size,
        overwrite=step.overwrite or own,
        beside=tuple(map(Path, step.beside)),
        trust=trusted,
    )


def _batches(job: Job) -> int | None:
    """What the run's own last evaluation read."""
    return next((s.batches for s in reversed(job.steps.values()) if isinstance(s, Evaluate) and s.of == "run"), None)
