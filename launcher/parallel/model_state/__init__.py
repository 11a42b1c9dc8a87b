"""State of a model besides its tensors (Python values, references, hooks): compared, copied, put back."""

__all__ = ["deep_copy", "global_hooks", "module_globals", "references", "restore_state"]
