"""Runs a stage operator by operator on a rank's shards, and redistributes tensors between operators."""

__all__ = ["equal_modules", "equal_stages", "measure_stage", "output_share", "record"]
