"""Runs modules again in their backward instead of keeping what they save for it.

What belongs here: the forward that does so, and which operations it keeps. Which modules do it is decided in
``launcher.plan.settings.recompute``.
"""

__all__ = ["forward"]
