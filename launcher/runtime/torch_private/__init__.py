"""Builds on private parts of torch's pipelines; checks that all private parts that the launcher uses exist."""
