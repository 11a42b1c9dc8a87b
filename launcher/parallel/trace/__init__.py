"""What a forward does, traced on meta tensors: a model's facts, and the graph of the code between its modules."""

__all__ = ["model_facts"]
