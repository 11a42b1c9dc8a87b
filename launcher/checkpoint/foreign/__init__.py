"""Checkpoints of other programs, read and written: Hugging Face folders, torch's DCP; names, dtypes, mismatches."""

__all__ = ["cast", "hf_write", "import_tensors", "mismatches", "read", "rename", "rename_tables"]
