"""The user's own data sets: sources, torch data sets with an index, and torch iterable data sets."""

__all__ = ["open", "readers", "repeatable_items"]
