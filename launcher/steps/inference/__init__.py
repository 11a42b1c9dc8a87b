"""What `predict` reads and writes."""
