"""Names on the Hugging Face hub where a path is expected: the launcher downloads nothing."""

from __future__ import annotations

import os
import re
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILE = re.compile(r"\.[A-Za-z]+")
"""Matches the suffix of a file, not the end of Llama-3.2-1B."""


def download_hint(path: str | os.PathLike[str], kind: Literal["model", "dataset"]) -> str:
    """Returns the end of a message about a path that does not exist: the command that downloads it.

    Returns "" unless the path looks like OWNER/NAME on the hub, and there is no folder OWNER.

    >>> download_hint("meta-llama/Llama-3.2-1B", "model").partition(": ")[2]
    'hf download meta-llama/Llama-3.2-1B --local-dir meta-llama/Llama-3.2-1B'
    >>> download_hint("corpora/web.jsonl", "dataset"), download_hint("../models/mine", "model")
    ('', '')
    """
    name = os.fspath(path)
    if not _NAME.fullmatch(name) or _FILE.fullmatch(os.path.splitext(name)[1]):
        return ""
    if os.path.lexists(name.partition("/")[0]):
        return ""
    option = " --repo-type dataset" if kind == "dataset" else ""
    text = "; it looks like a name on the Hugging Face hub; the launcher downloads nothing, this command does"
    return f"{text}: hf download {name}{option} --local-dir {name}"
