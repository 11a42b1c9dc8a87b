"""Complaints in plain words, and overrides that put them right."""
