"""Cures: problems in plain words, each with overrides to paste that correct it."""

__all__ = ["keeps_meaning", "paste", "report", "validation_errors"]
