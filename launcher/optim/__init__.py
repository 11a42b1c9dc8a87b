"""Optimizers and learning-rate schedules by name."""

__all__ = ["build", "probe", "schedule", "state_packing"]
