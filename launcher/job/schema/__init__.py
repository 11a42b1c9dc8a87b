"""The schema of a request: every key, its type, and which keys are secret. Opens no file, imports no Hydra."""
