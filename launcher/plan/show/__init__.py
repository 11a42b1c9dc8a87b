"""The views of a plan: its text on a page, JSON for programs, and pictures. They decide nothing."""

__all__ = ["chart_axis", "graphs_svg", "memory_svg", "plan_json", "text", "timeline", "timeline_svg"]
