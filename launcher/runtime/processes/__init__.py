"""Rank processes: starts and supervises them, and finds the one that failed or hangs."""

__all__ = ["fork_server", "hang", "start_and_restart"]
