"""``data=chat``: conversations through the tokenizer's template; the loss counts the assistant's turns only.

Tokens are made once, before the ranks start. Nothing here imports torch but the samples themselves.
"""

__all__ = ["checks", "tokens"]
