"""From seconds that were measured on a cluster to its numbers, and to the file that has them."""

__all__ = ["cluster_file", "constants", "refit", "timed", "tiny_copies"]
