"""What ``calibrate`` times on each rank: kernels, messages, tiny trainings; round after round."""

__all__ = ["measure", "sample"]
