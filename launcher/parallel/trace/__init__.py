"""What a forward does, seen once on meta tensors: a model's facts, and the graph of the code between its modules."""
