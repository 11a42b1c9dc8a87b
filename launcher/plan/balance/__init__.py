"""stage_config: auto. Cuts a chain of blocks into stages of equal time that fit."""
