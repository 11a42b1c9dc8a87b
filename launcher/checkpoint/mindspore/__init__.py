"""Checkpoints as MindSpore has them: one file a rank, functions of the same names. Formats are in ``formats``."""
