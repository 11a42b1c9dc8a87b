"""Makes ``.tokens`` files of text, JSON lines, Parquet and Arrow: over all cores, in bounded memory.

One process reads and writes, in order, so that the tokens do not hang on how many others encode. Nothing here
imports torch.
"""

__all__ = ["checks", "prepare", "speed", "stand_in", "text_cache"]
