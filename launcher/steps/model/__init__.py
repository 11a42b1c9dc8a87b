"""The model that a step acts on: one rank's part, or all of it in one process."""

__all__ = ["build_session", "shared_construction"]
