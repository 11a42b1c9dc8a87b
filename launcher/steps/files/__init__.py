"""What a step on files is given, before anything starts and when it is carried out; and ``prepare``."""

__all__ = ["checks"]
