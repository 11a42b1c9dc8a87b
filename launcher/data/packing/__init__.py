"""Files of tokens as samples: windows, or full documents in padded windows; mixtures of sources."""
