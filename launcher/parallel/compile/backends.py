"""The compilers that this torch knows."""

from __future__ import annotations


def backends() -> tuple[str, ...]:
    """Those of torch and those that installed packages bring, by name."""
    from torch._dynamo import list_backends  # takes a second

    return tuple(list_backends(exclude_tags=()))
