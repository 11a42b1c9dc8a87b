"""Refuses models, optimizers and evaluations that a layout would train to other numbers, with a way out."""

__all__ = [
    "drill",
    "evaluation",
    "model_effects",
    "outputs",
    "own_optimizer",
    "recorded_forward",
]
