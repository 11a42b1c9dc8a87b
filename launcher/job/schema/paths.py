"""Paths in settings: which are valid, and which are in the run folder.

``run:`` stands for the run folder, which has no name yet when a request is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

RUN = "run:"
BEST = "best"
"""Stands for the checkpoint that ``checkpoint.best`` keeps; a folder of that name is written ./best."""
TAKEN = (
    "certificate.json", "certify", "checkpoints", "command.txt", "config.yaml", "drill", "drill.json",
    "errors", "exports", "graphs", "job.sbatch", "job.yaml", "loggers", "logs", "memory.svg",
    "metrics.csv", "metrics.jsonl", "plan.json", "plan.txt", "profile", "report.html", "request.yaml",
    "sky.yaml", "status.json", "strategy", "tensorboard", "timeline.json", "timeline.svg",
    "transformed", "versions.json",
)  # fmt: skip
"""Names in the run folder that the run and its steps use."""
_UNEXPANDED = re.compile(r"~[\w.-]*(/|$)|\$\w+(/|$)")
_SCHEME = re.compile(
    r"""(?:^\s*|/)([A-Za-z][A-Za-z0-9+.-]*)://            # a URL, also one that was joined to a folder
    |^\s*(?!run:)([A-Za-z][A-Za-z0-9+.-]+):/             # a URL as pathlib writes it
    """,
    re.VERBOSE,
)
LONGEST_NAME, LONGEST_PATH = 255, 4000
"""The most bytes of a name, and of a path, that file systems accept."""


def local(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` if it cannot be a path of this machine as it is written.

    ``~``, ``$HOME`` and URLs such as ``s3://`` are refused: taken literally, they would name new folders.
    ``str(Path(url))`` has one slash less, and is refused too. A line break would begin a new line in a batch
    file.
    """
    if not path.strip():
        raise ValueError("should not be empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise ValueError("should be a path without line breaks and other control characters")
    try:
        longest = max(len(name.encode()) for name in path.split("/"))
    except UnicodeEncodeError:
        raise ValueError("should be a path in UTF-8") from None
    if longest > LONGEST_NAME or len(path) > LONGEST_PATH:
        raise ValueError(
            f"should be a path of at most {LONGEST_PATH} characters, "
            f"with names of at most {LONGEST_NAME} bytes"
        )
    if _UNEXPANDED.match(path):
        why = f"should be a path: {path.partition('/')[0]} is expanded only by the shell"
        raise ValueError(f"{why}; write the folder that it stands for, or ./{path} for a folder of this name")
    if not (of_url := scheme(path)):
        return path
    if of_url.startswith("file:"):
        prefix = of_url if of_url == "file://" else "file:"
        raise ValueError(f"should be a path: write {path.lstrip().removeprefix(prefix)} without {prefix}")
    folder = of_url.removesuffix("/")
    named = "" if folder.endswith("/") else f"; a folder that is called {folder} is written ./{folder}"
    raise ValueError(
        f"should be a path of this machine: {of_url} is not read or written; "
        f"mount it, or copy the files, and name the folder{named}"
    )


def scheme(path: str) -> str:
    """Returns the scheme of a URL, with its slashes; "" if ``path`` is not one.

    >>> scheme("s3://bucket/x"), scheme("s3:/bucket/x"), scheme("./run:1/x"), scheme("C:/x")
    ('s3://', 's3:/', '', '')
    """
    match = _SCHEME.search(path)
    if match is None:
        return ""
    return f"{match[1]}://" if match[1] else f"{match[2]}:/"


def unusable(path: str) -> str:
    """Returns why ``path`` cannot be a path of this machine, as ``local`` says it; "" if it can."""
    try:
        local(path)
    except ValueError as error:
        return str(error)
    return ""


FilePath = Annotated[str, AfterValidator(local)]
"""The type of every setting that names a file or a folder."""


def checked(path: str) -> str:
    """Returns ``path``; raises ``ValueError`` if ``run:`` has an invalid name, or one that the run uses."""
    parts = local(path).removeprefix(RUN).split("/")
    if path.startswith(RUN):
        if any(not part or part.startswith(".") for part in parts):
            raise ValueError(f"should be {RUN}NAME, a name in the run folder")
        if parts[0] in TAKEN:
            raise ValueError(f"the run itself writes {parts[0]} in its folder; choose another name")
    return path


def names(settings: Any) -> tuple[str, ...]:
    """Returns the first names in the run folder of all ``run:NAME`` in ``settings``, a nested value.

    >>> names({"parallel": {"dump": "run:norms/a"}, "steps": [{"to": "run:p.jsonl"}], "name": "digits"})
    ('norms', 'p.jsonl')
    """
    if isinstance(settings, str):
        return (settings.removeprefix(RUN).partition("/")[0],) if settings.startswith(RUN) else ()
    if isinstance(settings, Mapping):
        settings = settings.values()
    elif not isinstance(settings, list | tuple):
        return ()
    return tuple(dict.fromkeys(name for value in settings for name in names(value) if name))


def place(path: str, run: str) -> str:
    """Returns ``path`` with ``run:`` replaced by the run folder ``run``.

    >>> place("run:norms", "runs/digits/0001"), place("/data/norms", "runs/digits/0001")
    ('runs/digits/0001/norms', '/data/norms')
    """
    return f"{run}/{path.removeprefix(RUN)}" if path.startswith(RUN) else path
