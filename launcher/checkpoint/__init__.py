"""Tensors at rest: shards, layouts, strategies, transforms, exports.

No process group and no torch import; works on a login node, in memory that does not grow with the model.
"""
