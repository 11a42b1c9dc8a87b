"""Makes ``.tokens`` files of text, JSON lines, Parquet and Arrow: over all cores, in bounded memory.

One process reads and writes in order, so the tokens do not depend on the number of encoding processes.
Nothing here imports torch.
"""

__all__ = ["prepare", "progress", "text_cache"]
