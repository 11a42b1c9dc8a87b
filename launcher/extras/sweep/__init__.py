"""Many runs: planned together, run side by side here or on a cluster, ranked; a failed one stops no other."""
