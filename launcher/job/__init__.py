"""What was asked: the schema, its composition by Hydra, where each value was set, which classes may be named.

Nothing here decides anything (that is ``plan``) and nothing here imports torch.
"""
