"""Optimizers and learning-rate schedules by name."""

__all__ = ["build", "dry_run", "schedule", "sharded", "state_packing"]
