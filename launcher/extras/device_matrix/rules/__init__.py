"""How each of torch's operators may be cut: a file for each kind, and the table of all of them."""
