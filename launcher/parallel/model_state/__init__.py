"""State of a model besides its tensors (Python values, references, hooks): compared, copied, put back."""
