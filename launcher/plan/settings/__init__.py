"""What becomes of each setting: applied, satisfied, degraded, or refused with the reason."""
