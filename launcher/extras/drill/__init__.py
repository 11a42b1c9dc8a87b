"""Drills: a rank causes the planned fault on purpose, and a report says what happened."""
