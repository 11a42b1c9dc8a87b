"""Checks of a model that has been laid out: ranks agree on it, and each shard is the plan's box."""
