"""``steps=[calibrate]``: times kernels, messages and small trainings, and fits the constants of a cluster."""
