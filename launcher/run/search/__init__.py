"""Settings that a request leaves open: the layout that a run gets, tried out where it would run if asked for.

Not here: which layouts there are, and how they are predicted (``planner/search``).
"""
