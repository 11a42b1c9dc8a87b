"""Readers of real data and the order of samples, a pure function of (seed, epoch, index)."""
