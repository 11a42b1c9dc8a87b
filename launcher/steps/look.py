"""``verify`` and ``inspect``: a checkpoint looked at, nothing written."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.inspect import inspect
from launcher.checkpoint.manifest import read_manifest
from launcher.checkpoint.read import key_of, open_checkpoint
from launcher.checkpoint.transform import is_checkpoint
from launcher.checkpoint.verify import verify
from launcher.plan.memory import bytes_text
from launcher.plan.words import many


def check(folder: Path) -> None:
    """Raises ``ValueError`` for what is no checkpoint, or is not to be opened: all else is for ``verified`` to find."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        if is_checkpoint(folder):
            return
        raise
    key_of(folder, manifest)


def verified(folder: Path) -> str:
    """One line when all is well. Raises ``ValueError`` with every complaint, each naming its file."""
    if found := verify(folder):
        raise ValueError("\n".join(found))
    checkpoint = open_checkpoint(folder)
    entries, files = checkpoint.strategy.entries, checkpoint.manifest.files
    nbytes = bytes_text(sum(e.spec.nbytes for e in entries.values()))
    return (
        f"{folder}: {many(len(entries), 'tensor')}, {nbytes}, in {many(len(files), 'file')}: whole, every digest right"
    )


def inspected(folder: Path) -> str:
    return f"{folder}: " + inspect(open_checkpoint(folder).strategy).removesuffix("\n")
