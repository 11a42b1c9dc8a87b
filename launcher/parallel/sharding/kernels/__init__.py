"""What a rank runs for an operator on its parts of tensors: a file for each kind."""

__all__: list[str] = []
