"""The page of a run: its plan as pictures, its metrics as curves."""
