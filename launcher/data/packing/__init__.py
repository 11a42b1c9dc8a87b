"""Files of tokens as samples: windows, of one source or several that are mixed, and documents within them."""
