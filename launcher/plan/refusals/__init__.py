"""Models, optimizers and evaluations that a layout would train to other numbers: why, and the way out."""

__all__ = [
    "drill",
    "evaluation",
    "model_effects",
    "outputs",
    "own_optimizer",
    "recorded_forward",
]
