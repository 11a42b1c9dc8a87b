"""Balances stages: cuts a chain of blocks so that the step is the shortest that fits in memory."""
