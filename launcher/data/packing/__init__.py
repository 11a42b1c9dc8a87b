"""Files of tokens as samples: windows, or documents whole in padded ones; mixtures of sources."""
