"""Checkpoints and strategies as MindSpore has them: one file a rank, functions of the same names."""
