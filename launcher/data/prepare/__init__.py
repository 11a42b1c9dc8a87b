"""Converts text, JSON lines, Parquet and Arrow files to ``.tokens`` files, on all cores in bounded memory.

One process reads and writes in order, so the tokens do not depend on the number of encoding processes. The
package does not import torch.
"""

__all__ = ["prepare", "progress", "text_cache"]
