"""Manifests that run a request on Kubernetes: each pod is a node, and its ranks connect as under torchrun."""
