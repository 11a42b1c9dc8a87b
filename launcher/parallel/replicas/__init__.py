"""Keeps replicas equal: gradients of unsharded parameters, tied copies, running statistics."""
