"""Readers of data sets; the order of samples is a pure function of (seed, epoch, index)."""

__all__ = [
    "checks",
    "cifar10_fallback",
    "file_digests",
    "file_kinds",
    "image_source",
    "mnist5k",
    "open",
    "shuffle",
    "source",
    "spec",
    "text_tokenizer",
    "vocab_size",
]
