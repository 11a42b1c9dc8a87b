"""Which parts of a model are a stage: cuts of a row, the shortest step of those that fit."""
