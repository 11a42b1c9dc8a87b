"""Other programs' checkpoints, read and written: Hugging Face, PEFT, torch DCP; names, dtypes, mismatches."""

__all__ = [
    "hugging_face",
    "lora_adapters",
    "mismatches",
    "names",
    "one_file_per_rank",
    "read",
    "recognize_strategy",
]
