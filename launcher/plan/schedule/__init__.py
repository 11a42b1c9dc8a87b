"""Pipeline schedules: the order of actions of every rank, simulated and drawn."""

__all__ = ["lanes", "schedules", "timeline", "timeline_svg"]
