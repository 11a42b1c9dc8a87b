"""What a step on files is given: before anything starts, and when it is carried out."""

__all__ = ["checks"]
