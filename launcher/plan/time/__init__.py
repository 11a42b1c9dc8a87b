"""Seconds of a step: what it has to do, and how fast a cluster does it."""

__all__ = ["prediction", "speeds", "step_work", "traffic"]
