"""Runs a stage operator by operator on the parts of tensors that a rank has, and moves them in between."""

__all__ = ["equal_modules", "equal_stages", "measure_stage", "output_share", "record"]
