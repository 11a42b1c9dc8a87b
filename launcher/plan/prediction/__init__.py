"""How long a step of a plan takes on the cluster of its request, and why. Automatic stages depend on it.

Not here: what a plan holds in memory (``cost``), and the order of its actions (``schedule``).
"""

__all__ = ["prediction", "speeds", "step_seconds", "step_work"]
