"""The files that `predict` reads and writes."""
