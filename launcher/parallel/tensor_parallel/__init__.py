"""Operators cut over the tensor-parallel axis: where a cut is propagated, and the collectives that it takes."""
