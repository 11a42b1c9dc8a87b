"""What only tests and benchmarks use."""
