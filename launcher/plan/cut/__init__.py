"""The model cut into stages, and the parameters of each."""
