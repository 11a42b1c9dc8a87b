"""Data files on disk, read and checked without torch."""
