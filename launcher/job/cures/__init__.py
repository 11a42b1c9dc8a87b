"""Cures: problems in plain words, each with overrides to paste that correct it."""

__all__ = ["placeholder_values", "placement", "report", "safety", "validation_errors"]
