"""Code that only tests and benchmarks use."""
