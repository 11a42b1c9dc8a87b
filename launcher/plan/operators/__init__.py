"""Operator strategies: how each module is cut over the ``tp`` axis."""

__all__ = ["operator_file", "param_layouts", "resolve", "strategy"]
