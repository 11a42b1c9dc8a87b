"""``key=value`` on the command line: read, laid over a configuration, and what a wrong value was meant to be."""

__all__ = ["grammar"]
