"""What is put around the forward of a module: it runs again in its backward, and torch compiles it.

What belongs here: how that is done. Which modules it is done to is decided in ``launcher.plan.settings``.
"""

__all__ = ["compile", "compile_times", "graph_breaks", "recompute"]
