"""Models, optimizers and evaluations that a layout would train to other numbers: why, and what to do instead."""

__all__ = ["model_effects", "own_optimizer"]
