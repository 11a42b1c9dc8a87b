"""Finds the strategies that nobody wrote: the cheapest of a whole graph, by the cost model."""

__all__ = ["cluster_speeds", "cost"]
