"""The verbs that use what was trained, ``predict`` and ``sample``, with what they read and write.

Nothing of how a model makes its outputs: that is ``launcher.runtime.training.pipeline``.
"""
