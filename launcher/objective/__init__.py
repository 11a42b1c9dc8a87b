"""Losses and metrics, by name or of the user's own."""

__all__ = ["build", "losses", "metrics", "user_defined"]
