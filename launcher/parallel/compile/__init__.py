"""Compiles forwards and backwards of modules with ``torch.compile``, and counts how long that takes.

What belongs here: the forward of a compiled module, and what is put in its place for tracing. Which modules are
compiled is decided in ``launcher.plan.settings.compile``.
"""

__all__ = ["backends", "times"]
