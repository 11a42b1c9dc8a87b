"""What a forward does, traced on meta tensors: a model's facts, and a graph of the code between modules."""

__all__ = [
    "code_between_modules",
    "graph_recorder",
    "mixing_samples",
    "model_facts",
    "outside_reads",
    "sample_values",
    "specs",
    "world_reads",
    "zero_inputs",
]
