"""``key=value`` on the command line: read, laid over a configuration, and what a wrong value meant."""

__all__ = ["grammar"]
