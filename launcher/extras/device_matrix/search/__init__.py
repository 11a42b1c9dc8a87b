"""Finds the strategies that the request leaves out: the cheapest for the full graph, by the cost model."""
