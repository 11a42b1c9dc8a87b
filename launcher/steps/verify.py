"""``verify``: recomputes every digest of a checkpoint, and checks that no shard is missing."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.manifest import opened, read_manifest, unvouched
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.transform import is_checkpoint
from launcher.checkpoint.verify import verify
from launcher.errors import Problem
from launcher.job.schema.steps import Verify
from launcher.plan.resolve.encryption import Trust
from launcher.plan.values.text import bytes_text, many
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: Verify, at: FileChecks) -> list[Problem]:
    """Checks only that the checkpoint can be opened; the step itself checks the rest."""
    return at.source_problems(step.src, lambda src: _check_openable(src, at.trust))


def _check_openable(folder: Path, trust: Trust) -> None:
    try:
        manifest = read_manifest(folder)
    except ValueError:
        if is_checkpoint(folder):
            return
        raise
    opened(folder, manifest, trust)


def run_on_files(step: Verify, run: RunFiles) -> dict[str, float]:
    src = run.source(step.src)
    run.say(f"verify: {verified(src, run.trust)}{unvouched(src, run.trust)}")
    return {}


def verified(folder: Path, trust: Trust) -> str:
    """Returns one line if the checkpoint is undamaged. Raises ``ValueError`` with all problems."""
    if problems := verify(folder, trust):
        raise ValueError("\n".join(problems))
    checkpoint = open_checkpoint(folder, trust)
    entries, files = checkpoint.strategy.entries, checkpoint.manifest.files
    nbytes = bytes_text(sum(e.spec.nbytes for e in entries.values()))
    content = f"{many(len(entries), 'tensor')}, {nbytes}, in {many(len(files), 'file')}"
    return f"{folder}: {content}: complete, all digests match"
