"""One file on a disk: safetensors, encrypted or not, written durably, read through a bounded window."""

__all__ = ["disk", "encryption", "mmap_window", "safetensors", "watched_folder"]
