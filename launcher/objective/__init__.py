"""Losses and metrics: built-in ones by name, or the user's classes."""

__all__ = ["build", "losses", "metrics", "model_outputs", "user_defined"]
