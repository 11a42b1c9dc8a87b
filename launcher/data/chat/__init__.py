"""``data=chat``: conversations, rendered by the tokenizer's template; only assistant turns have a loss.

Tokens are made once, before the ranks start. Only the module of the samples imports torch.
"""

__all__ = ["checks", "tokens"]
