"""The private parts of torch that we stand on, and nothing else of them."""
