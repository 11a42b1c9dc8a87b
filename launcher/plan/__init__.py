"""What will happen, as frozen values computed from a Job and the facts of a model.

No torch, no Hydra, no files, no environment: a plan can be made, printed and compared anywhere.
"""
