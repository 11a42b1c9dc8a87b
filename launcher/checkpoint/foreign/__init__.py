"""Reads checkpoints of other programs (Hugging Face, PEFT, torch DCP, MindSpore); writes all but DCP."""

__all__ = [
    "hugging_face",
    "import_checkpoint",
    "lora_adapters",
    "mismatches",
    "names",
    "one_file_per_rank",
    "recognize_strategy",
]
