"""Names of the cells of a sweep, and of their folders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.job.schema import redact

SHOWN = 80
"""The maximum number of characters of values in a name."""


def cell_name(k: int, varied: Sequence[str]) -> str:
    """Returns the number ``k`` and the varied values, in characters that are safe in a path.

    Secrets are left out.
    """
    words = [v.partition("=")[2] for v in varied if redact.text(v) == v]
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", _short(w)).strip("_.") for w in words)
    return f"{k}-{text[:SHOWN]}".rstrip("-")


def _short(word: str) -> str:
    """
    >>> _short("0.00012345678901234"), _short("0.001"), _short("1f1b")
    ('0.0001235', '0.001', '1f1b')
    """
    try:
        return word if len(word) < 8 else f"{float(word):.4g}"
    except ValueError:
        return word
