"""Sweeps: many runs, side by side here or on a cluster, and ranked; a failed run stops no other."""
