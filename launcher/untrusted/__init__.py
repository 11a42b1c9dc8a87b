"""Reads files that others may have made: regular files only, within bounds of size and depth; runs none."""

__all__ = ["bounded", "files", "hub", "pickles"]
