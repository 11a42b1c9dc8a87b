"""Files that somebody else may have made: regular ones alone, of bounded size and depth, executed never."""

__all__ = ["bounded", "files", "links", "pickles"]
