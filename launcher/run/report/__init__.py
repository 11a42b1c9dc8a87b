"""Shows a run to people: its plan as pictures, its metrics as curves, on a page of its own or in TensorBoard.

They are made of what the run folder has anyway, by the process that writes that; no rank waits for them.
"""

__all__ = ["chart", "curve", "page"]
