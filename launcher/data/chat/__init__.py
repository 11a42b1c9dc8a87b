"""``data=chat``: conversations by a tokenizer's own template, of which only what the assistant says counts.

Tokens are made once, before the ranks start. Nothing here imports torch but the samples themselves.
"""

__all__ = ["cache", "checks"]
