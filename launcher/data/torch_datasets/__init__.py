"""The user's torch data sets: by index, or in their own order."""

__all__ = ["open", "repeatable_items", "stream"]
