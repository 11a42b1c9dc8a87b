"""Losses and metrics, by name or of the user's own."""

__all__ = ["build", "cross_entropy", "losses", "metrics", "own", "probe", "structure"]
