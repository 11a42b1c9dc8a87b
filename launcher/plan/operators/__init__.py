"""Operator strategies: how each module is cut over the ``tp`` axis."""
