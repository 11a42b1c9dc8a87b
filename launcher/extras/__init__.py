"""Optional parts: each folder can be deleted, and takes nothing with it but itself.

The core reaches them through the tables of ``launcher.optional``, and imports none of them.
"""
