"""Folders of class folders of images: listed, checked, read, augmented."""
