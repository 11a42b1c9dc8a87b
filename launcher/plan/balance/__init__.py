"""``stage_config: auto``: cuts a chain of blocks into stages, so that the step is the shortest that fits."""
