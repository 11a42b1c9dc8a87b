"""The search for a layout: the candidates, a lower bound for each, and the best of those that are planned."""
