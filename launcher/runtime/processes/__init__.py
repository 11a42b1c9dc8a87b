"""Rank processes: started, supervised, told apart when one fails or hangs."""

__all__ = ["blame", "fork_server", "rendezvous", "start"]
