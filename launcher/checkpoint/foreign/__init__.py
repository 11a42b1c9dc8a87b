"""Other programs' checkpoints, read and written: Hugging Face, PEFT, torch DCP; names, dtypes, mismatches."""

__all__ = [
    "adapters",
    "cast",
    "experts",
    "hf_names",
    "hf_read",
    "hf_write",
    "import_tensors",
    "mismatches",
    "read",
    "rename",
    "rename_tables",
]
