"""Chooses the settings that a request leaves open, and measures candidates where the run would start.

Not here: which layouts there are, and how they are predicted (``planner/search``).
"""
