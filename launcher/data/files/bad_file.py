"""The error for a data file that is not what its name says."""

from __future__ import annotations


class BadFile(ValueError):
    """A file is not what its name says. The text is the reason; callers put the file's name before it."""
