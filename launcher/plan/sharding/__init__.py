"""Operators over a device matrix: strategies of single operators, and how tensors move between them.

All ranks of a pipeline stage are one set here, which each operator cuts in its own way. Cuts over the one
``tp`` axis that a whole model shares are in ``plan/operators``.
"""

__all__ = [
    "known_params",
    "meeting_ranks",
    "moves",
    "op_graph",
    "op_rule",
    "operator_rows",
    "parameters",
    "repeated_modules",
    "sharded_graph",
    "show_sharding",
    "stage_sharding",
    "step_memory",
    "tensor_layout",
    "traffic",
]
