"""What a forward does, traced on meta tensors: a model's facts, and a graph of the code between modules."""

__all__ = [
    "build_graph",
    "clock_and_host_reads",
    "code_between_modules",
    "identity_of_inputs",
    "mixing_samples",
    "model_structure",
    "python_streams",
    "run_module",
    "sample_values",
    "tensor_specs",
    "torch_distributed_reads",
]
