"""The cut: which module is on which stage, where each tensor lives, how a batch is divided."""
