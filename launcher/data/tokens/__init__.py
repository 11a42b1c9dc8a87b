"""Token files of any size, their mixtures, and the windows that are samples."""

__all__ = ["vocab_range_check"]
