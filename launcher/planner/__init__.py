"""From a request to its plan: its files are read, the model is built without memory, ``plan`` decides."""

__all__ = ["epochs", "own_classes", "plan_job"]
