"""Settings that name files which layouts, operator strategies and groups of ranks are written to or read from."""
