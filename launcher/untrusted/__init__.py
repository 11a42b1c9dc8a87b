"""Reads files that others may have made: only regular files, of limited size and depth; runs no code."""

__all__ = ["bounded", "files", "hub_name_hint", "pickles"]
