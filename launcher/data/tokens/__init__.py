"""Files of tokens, and the windows of them that are samples."""
