"""What files have of operators over device matrices: rows of strategies."""

__all__ = ["operator_rows"]
