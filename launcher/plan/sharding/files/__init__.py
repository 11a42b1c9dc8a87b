"""What files say of operators over device matrices: names of operators, rows of strategies, layouts to follow."""

__all__ = ["operator_names", "operator_rows"]
