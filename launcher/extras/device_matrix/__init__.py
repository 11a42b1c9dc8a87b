"""Operators over device matrices: strategies of single operators, and how tensors move between them.

All ranks of a pipeline stage are one set here, which each operator cuts in its own way. Cuts over the one
``tp`` axis that all of a model shares are in ``launcher.plan.tensor_parallel``.
"""
