"""Optimizers and learning-rate schedules by name."""

__all__ = ["build", "own_schedule", "probe", "schedule", "state_packing", "whole_tensors"]
