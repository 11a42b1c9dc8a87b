"""Drills: a planned fault, carried out by the rank that it is planned for, and what is noted of it."""

__all__ = ["rank_drill", "record"]
