"""A run as a job of Kubernetes, as text: each pod is a node, whose ranks join as under torchrun."""
