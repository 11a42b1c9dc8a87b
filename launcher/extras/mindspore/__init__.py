"""Checkpoints and strategies as MindSpore has them: one file per rank, functions of the same names."""
