"""The model that a step acts on: of one rank, or whole in one process."""

__all__ = ["build_session", "shared_construction"]
