"""Initialisation without the memory: a constructor is recorded, and each rank makes its own part of its tensors."""
