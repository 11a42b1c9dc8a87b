"""The step ``merge_strategies``: checks its settings, and writes the merged file in the requested form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.foreign.recognize_strategy import is_ours
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.store import check_outside_checkpoints
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import Problem
from launcher.extras.mindspore.merge_strategies import SUFFIX, merged_file, merging, read_stages
from launcher.extras.mindspore.strategy_file import form_of, write_strategy
from launcher.job.schema.steps import MergeStrategies
from launcher.plan.values.text import many
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: MergeStrategies, at: FileChecks) -> list[Problem]:
    problems: list[Problem] = []
    if step.src is not None and at.here(step.src):
        src, folder = Path(step.src), Path(at.job.run_dir or at.job.runs)
        unnamed = step.model_copy(update={"dst": None})
        problems = at.problems("src", lambda: _check_folder(src))
        problems = problems or at.problems(
            "src", lambda: prepared(unnamed, src, target(unnamed, folder, src))
        )
        if step.dst is not None and not problems:
            problems = at.problems("dst", lambda: prepared(step, src, target(step, folder, src)))
    return [*_check_suffix(step, at.key), *(problems or at.unwritable("dst", step.dst, "file"))]


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")


def _check_suffix(step: MergeStrategies, key: str) -> list[Problem]:
    """Returns a problem if suffix and form differ. It has no cure, as either of them may be intended."""
    suffix = SUFFIX.get(step.form)
    if step.dst is None or suffix is None or Path(step.dst).suffix == suffix or Path(step.dst).is_dir():
        return []
    return [Problem(f"{key}.dst", f"{step.dst}: the name of a file of form {step.form} must end in {suffix}")]


def run_on_files(step: MergeStrategies, run: RunFiles) -> dict[str, float]:
    source = Path(step.src) if step.src else run.last() / "strategy"
    merged = target(step, run.strategy, source)
    run.say(f"merge_strategies: {many(merge(step, source, merged), 'stage')} -> {merged}")
    return {}


def target(step: MergeStrategies, folder: Path, source: Path) -> Path:
    """Returns the file that ``step`` names, else a file in ``folder`` with the suffix of the new form."""
    if step.dst is not None:
        return Path(step.dst)
    form: str = step.form
    if form == "same":
        form = "protobuf" if any(source.glob("*.ckpt")) else "json"
    return folder / f"merged{SUFFIX.get(form, '.json')}"


def merge(step: MergeStrategies, source: Path, merged: Path) -> int:
    """Merges the files; returns their number. Raises as ``merge_pipeline_strategies``."""
    files, write = prepared(step, source, merged)
    write()
    return files


def prepared(step: MergeStrategies, source: Path, merged: Path) -> tuple[int, Callable[[], None]]:
    """Returns the number of files to merge, and the function that writes the result.

    Raises as ``merge``; writes nothing itself.
    """
    if merged.is_dir():
        text = "a folder, but the merged strategy is one file; give a file name in this folder"
        raise ValueError(f"{merged}: {text}")
    check_outside_checkpoints(merged)

    # merge in the files' own form
    files: list[Path] = []
    if source.is_dir():
        files = sorted(p for p in source.glob("*") if p.suffix in SUFFIX.values())
    if step.form == "same" or not files or (step.form == "ours" and all(map(is_ours, files))):
        return len(files), merging(source, merged)

    # convert to another form
    if step.form == "ours":
        text = "MindSpore's files have no dtypes, which form ours needs; give form: protobuf or json"
        raise ValueError(f"{files[0]}: {text}")
    form = step.form
    strategy = merged_file(strategy_file.load(source)) if all(map(is_ours, files)) else read_stages(files)[0]

    def write() -> None:
        make_folder(merged.parent)
        write_strategy(merged, strategy, form)
        assert form_of(merged.read_bytes()) == form

    return len(files), write
