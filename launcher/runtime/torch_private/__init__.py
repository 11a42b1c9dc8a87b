"""Builds on private parts of torch's pipelines; checks that torch has all private parts that are used."""
