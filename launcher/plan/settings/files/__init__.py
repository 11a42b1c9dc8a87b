"""Settings that name files: layouts, operator strategies and groups of ranks, written or read."""
