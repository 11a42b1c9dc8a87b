"""Rank processes: started, supervised, told apart when one fails or hangs."""

__all__ = ["fork_server", "hang", "start"]
