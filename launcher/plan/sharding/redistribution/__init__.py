"""How a tensor gets from one layout to another: collectives, chosen by the bytes that ranks receive."""

__all__ = ["direct_exchange", "planned", "step"]
