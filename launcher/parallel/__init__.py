"""Modules obey the plan: read, split, materialise, shard, tie, check.

The only folder that wraps modules. It decides nothing, opens no file, and knows no Hydra.
"""
