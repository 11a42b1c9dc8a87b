"""The YAML files that a request is composed of: where they are, what they must not hold, which line set which key."""
