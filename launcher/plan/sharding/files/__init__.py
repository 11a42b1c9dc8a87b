"""What files say of operators over device matrices: their names, rows of strategies, layouts to follow."""

__all__ = ["known_params", "operator_names", "operator_rows"]
