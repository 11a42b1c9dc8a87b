"""The collectives of a step: what is sent together, and in which order."""
