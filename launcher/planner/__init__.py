"""From a request to its plan: the files it names are read, the model is built without memory, ``plan`` decides."""

__all__ = ["plan_job"]
