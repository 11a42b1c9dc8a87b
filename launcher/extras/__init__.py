"""Optional parts, a folder each: the core imports none of them, and runs without them.

It reaches them through the tables of ``launcher.optional``. Some parts need another one: ``loggers`` and
``sweep`` need ``report``, ``layout_search`` needs ``calibration``, and ``mindspore`` needs ``device_matrix``.
"""
