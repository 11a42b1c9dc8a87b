"""The private parts of torch that the launcher uses. No other folder uses any."""
