"""Sequences in chunks: where they can be cut, and what the earlier chunks leave for the later ones."""
