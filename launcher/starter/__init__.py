"""The files of a small project to begin with, in ``project``, and ``init``, which copies them."""

__all__ = ["new_project"]
