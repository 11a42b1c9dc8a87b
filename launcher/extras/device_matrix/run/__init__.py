"""Runs a stage operator by operator on a rank's shards, and redistributes tensors between operators."""
