"""Checkpoints and strategies in MindSpore's formats, and functions with MindSpore's names."""
