"""What files say of operators over device matrices: rows of strategies, layouts to follow."""

__all__ = ["known_params", "operator_rows"]
