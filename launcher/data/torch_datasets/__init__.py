"""Data sets of the user's own that are torch's: by index, or in their own order."""

__all__ = ["open", "stream"]
