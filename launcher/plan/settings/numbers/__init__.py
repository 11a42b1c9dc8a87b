"""Settings that change the numbers of a step in any layout: dtypes, kernels, means or sums."""
