"""Paths in a request: on this machine, or in the run folder, written ``run:NAME``.

A request is made before its run folder has a name.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

RUN = "run:"
BEST = "best"
"""Stands for the checkpoint that ``checkpoint.best`` keeps; a folder of that name is ./best."""
TAKEN = (
    "certificate.json", "certify", "checkpoints", "command.txt", "config.yaml", "drill", "drill.json",
    "errors", "exports", "graphs", "job.sbatch", "job.yaml", "loggers", "logs", "memory.svg",
    "metrics.csv", "metrics.jsonl", "plan.json", "plan.txt", "profile", "report.html", "request.yaml",
    "sky.yaml", "status.json", "strategy", "tensorboard", "timeline.json", "timeline.svg",
    "transformed", "versions.json",
)  # fmt: skip
"""Names in the run folder that the run and its steps use."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def local(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` for URLs such as ``s3://``, which would name a local folder."""
    if (found := _SCHEME.match(path)) is None:
        return path
    if found[1] == "file":
        raise ValueError(f"should be a path: write {path[len(found[0]) :]} without file://")
    raise ValueError(
        f"should be a path of this machine: {found[1]}:// is not read or written; "
        "mount it, or copy the files, and name the folder"
    )


FilePath = Annotated[str, AfterValidator(local)]
"""The type of every setting that names a file or a folder."""


def checked(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` if ``run:`` has an invalid name, or one that the run uses."""
    parts = local(path).removeprefix(RUN).split("/")
    if path.startswith(RUN):
        if any(not part or part.startswith(".") for part in parts):
            raise ValueError(f"should be {RUN}NAME, a name in the run folder")
        if parts[0] in TAKEN:
            raise ValueError(f"the run itself writes {parts[0]} in its folder")
    return path


def place(path: str, run: str) -> str:
    """The path of ``path`` if the run folder is ``run``.

    >>> place("run:norms", "runs/digits/0001"), place("/data/norms", "runs/digits/0001")
    ('runs/digits/0001/norms', '/data/norms')
    """
    return f"{run}/{path.removeprefix(RUN)}" if path.startswith(RUN) else path
