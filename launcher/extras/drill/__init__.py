"""Drills: the rank that a fault is planned for causes it, and the report says what happened."""
