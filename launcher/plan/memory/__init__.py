"""Bytes of a step: the one walk through it, the loads of each rank, the room on a device."""
