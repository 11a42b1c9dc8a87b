"""Optional parts, one folder each: the core imports none of them, and runs without them.

The core reaches them through the tables of ``launcher.optional``, and they reach each other in the same way.
A folder can be deleted, and everything else still works.
"""
