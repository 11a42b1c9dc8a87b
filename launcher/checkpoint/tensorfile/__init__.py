"""One file on a disk: safetensors, encrypted or not, written durably, read through a bounded window."""

__all__ = ["blob", "disk_space", "durable", "json_file", "keys"]
