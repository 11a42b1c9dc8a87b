"""What a model keeps besides its tensors (Python values, references, hooks): compared, copied, put back."""
