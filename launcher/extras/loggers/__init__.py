"""Metric services, and the child process that feeds each."""
