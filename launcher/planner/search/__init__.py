"""The search for a layout: the candidates, a lower bound for each, and the best of those that are planned.

Not here: how a plan is made (``planner``) and how long its step takes (``plan/prediction``).
"""

__all__ = ["candidates", "evaluate", "ranking", "search", "settle", "show_ranking"]
