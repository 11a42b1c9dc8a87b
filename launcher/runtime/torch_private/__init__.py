"""The private parts of torch that we build on, and nothing else of them."""
