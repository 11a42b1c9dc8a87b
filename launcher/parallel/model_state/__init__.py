"""State of a model besides its tensors (Python values, references, hooks): compared, copied, put back."""

__all__ = ["deep_copy", "hooks", "module_globals", "python_state", "references", "variables_read"]
