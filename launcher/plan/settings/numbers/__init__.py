"""Settings that the numbers of a step hang on, whatever the layout is: dtypes, kernels, means or sums."""
