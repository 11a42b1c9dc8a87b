"""Checkpoints of other programs, read and written: Hugging Face folders, torch's DCP; names, dtypes, mismatches."""
