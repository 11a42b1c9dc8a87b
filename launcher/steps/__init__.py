"""One small file a verb: what happens, in order. The work itself lives in ``runtime`` and ``checkpoint``."""
