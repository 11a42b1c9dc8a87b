"""Files of tokens of any size and their mixtures, and the windows of them that are samples."""

__all__ = ["token_ids"]
