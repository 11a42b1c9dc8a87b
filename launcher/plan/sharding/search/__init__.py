"""Finds the strategies that nobody wrote: the cheapest of a whole graph, by the cost model."""

__all__ = ["cost", "speeds"]
