"""Turns seconds that were measured on a cluster into its constants, and writes the file that has them."""

__all__ = ["cluster_file", "constants", "refit", "timed", "tiny_copies"]
