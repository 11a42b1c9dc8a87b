"""Other programs' checkpoints, read and written: Hugging Face, torch DCP; names, dtypes, mismatches."""

__all__ = [
    "cast",
    "hf_names",
    "hf_read",
    "hf_write",
    "import_tensors",
    "mismatches",
    "read",
    "rename",
    "rename_tables",
]
