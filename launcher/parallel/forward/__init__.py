"""Wrappers around the forward of a module: recomputation in its backward, and torch.compile.

What belongs here: how that is done. Which modules it is done to is decided in ``launcher.plan.settings``.
"""

__all__ = ["compile", "compile_times", "graph_breaks", "recompute"]
