"""Paths in the run folder, written ``run:NAME``: a request is made before the folder has a name."""

from __future__ import annotations

RUN = "run:"
BEST = "best"
"""In place of a path: the checkpoint that ``checkpoint.best`` keeps; a folder of that name is ./best."""
TAKEN = (
    "certificate.json", "certify", "checkpoints", "command.txt", "config.yaml", "drill", "drill.json",
    "errors", "exports", "graphs", "job.sbatch", "job.yaml", "loggers", "logs", "memory.svg",
    "metrics.csv", "metrics.jsonl", "plan.json", "plan.txt", "profile", "report.html", "request.yaml",
    "sky.yaml", "status.json", "strategy", "tensorboard", "timeline.json", "timeline.svg",
    "transformed", "versions.json",
)  # fmt: skip
"""What a run and its steps themselves write there."""


def checked(path: str) -> str:
    """``path``; ``ValueError`` where ``run:`` is followed by an invalid name, or one that the run uses."""
    parts = path.removeprefix(RUN).split("/")
    if path.startswith(RUN):
        if any(not part or part.startswith(".") for part in parts):
            raise ValueError(f"should be {RUN}NAME, a name in the run folder")
        if parts[0] in TAKEN:
            raise ValueError(f"the run itself writes {parts[0]} in its folder")
    return path


def place(path: str, run: str) -> str:
    """Where ``path`` is when the run folder is ``run``.

    >>> place("run:norms", "runs/digits/0001"), place("/data/norms", "runs/digits/0001")
    ('runs/digits/0001/norms', '/data/norms')
    """
    return f"{run}/{path.removeprefix(RUN)}" if path.startswith(RUN) else path
