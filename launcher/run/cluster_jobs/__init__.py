"""A run that starts elsewhere: planned here, frozen in its run folder, written as a job for a cluster."""

__all__ = ["frozen_request", "handover"]
