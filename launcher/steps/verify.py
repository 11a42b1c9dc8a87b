"""``verify`` and ``inspect``: a checkpoint looked at, nothing written."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.inspect import inspect
from launcher.checkpoint.manifest import read_manifest
from launcher.checkpoint.manifest_mac import opened
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.transform import is_checkpoint
from launcher.checkpoint.verify import verify
from launcher.plan.values.text import bytes_text, many
from launcher.plan.values.trust import Trust


def check(folder: Path, trust: Trust) -> None:
    """Raises ``ValueError`` for what is no checkpoint, or is not to be opened: all else is for ``verified`` to find."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        if is_checkpoint(folder):
            return
        raise
    opened(folder, manifest, trust)


def verified(folder: Path, trust: Trust) -> str:
    """One line when all is well. Raises ``ValueError`` with every complaint, each naming its file."""
    if found := verify(folder, trust):
        raise ValueError("\n".join(found))
    checkpoint = open_checkpoint(folder, trust)
    entries, files = checkpoint.strategy.entries, checkpoint.manifest.files
    nbytes = bytes_text(sum(e.spec.nbytes for e in entries.values()))
    return (
        f"{folder}: {many(len(entries), 'tensor')}, {nbytes}, in {many(len(files), 'file')}: whole, every digest right"
    )


def inspected(folder: Path, trust: Trust) -> str:
    return f"{folder}: " + inspect(open_checkpoint(folder, trust).strategy).removesuffix("\n")
