"""Optional parts, one folder each: the core imports none of them, and runs without them.

It reaches them through the tables of ``launcher.optional``, and so do they each other: a folder can be
deleted, and takes nothing with it but itself.
"""
