"""Pictures of a run for people: its plan drawn, its metrics as curves, all of it as one page.

They are made of what the run folder has anyway, by the process that writes that; no rank waits for them.
"""
