"""Refuses models, optimizers and evaluations that a layout would train to other numbers, with a way out."""

__all__ = ["evaluation", "model", "optimizer"]
