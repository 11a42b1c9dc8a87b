"""Pipeline schedules: the order of actions of every rank, simulated."""

__all__ = ["schedules"]
