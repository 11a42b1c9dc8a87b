"""One file on a disk: safetensors, encrypted or not, written durably, read through a bounded window."""

__all__ = ["blob", "disk_space", "durable", "header", "json_file", "keys", "safetensors"]
