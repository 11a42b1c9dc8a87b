"""Odd but legal models, each under every layout, against plain torch in one process."""
