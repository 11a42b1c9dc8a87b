"""Pipeline schedules: the order of actions of every rank, simulated and drawn."""

__all__ = ["chart_axis", "schedules", "timeline", "timeline_svg"]
