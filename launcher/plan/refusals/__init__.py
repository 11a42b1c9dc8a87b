"""Refuses models, optimizers and evaluations that a layout would train differently, with a way out."""

__all__ = ["evaluation", "model", "optimizer"]
