"""Sequences in pieces: where they can be cut, and what earlier pieces leave for later ones."""

__all__ = ["carry", "chunks"]
