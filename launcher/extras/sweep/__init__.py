"""Many runs: planned together, run side by side here or by a cluster, ranked; one that fails ends alone."""
