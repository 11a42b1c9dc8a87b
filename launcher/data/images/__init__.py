"""Readers of image files, and images as samples."""
