"""The YAML files of a request: where they are, their limits, and which line set which key."""

__all__ = ["config_files", "origins", "shipped"]
