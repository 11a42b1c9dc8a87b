"""The section ``security``: trusted packages and files."""

from __future__ import annotations

from typing import Literal

from launcher.job.schema.base import Settings


class Security(Settings):
    """Trusted packages and files. ``allow``: packages whose code may run.

    ``recipe`` auto: files of the current folder and of --config-dir are trusted, others are not.
    """

    allow: tuple[str, ...] = ()
    recipe: Literal["auto", "trusted", "untrusted"] = "auto"
