"""Operators cut over the tensor-parallel axis: where a cut goes through a model, and the collectives that it takes."""
