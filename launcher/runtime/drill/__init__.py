"""Drills: the rank that a fault is planned for causes it, and records what happened."""

__all__ = ["rank_drill", "record"]
