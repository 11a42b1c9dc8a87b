"""The error for a data file that is not what its name says."""

from __future__ import annotations


class BadFile(ValueError):
    """The text is the reason, to be put after the file's name."""
