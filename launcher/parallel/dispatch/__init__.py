"""The base of all observers of a running model: dispatch modes, containers of tensors, meta kernels."""

__all__ = ["meta_kernels", "modes", "training_mode", "user_lines"]
