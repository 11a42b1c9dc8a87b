"""Folders of class folders of images: listed, checked, read, augmented."""

__all__ = ["checks", "listing", "open"]
