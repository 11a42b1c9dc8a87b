"""Single files on disk: safetensors and encrypted files, durable writes, reads in bounded memory."""

__all__ = ["disk", "encryption", "mmap_window", "safetensors", "watched_folder"]
