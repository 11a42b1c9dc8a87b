"""The request as frozen values: every key, its type, and which keys are secret. No file, no Hydra."""
