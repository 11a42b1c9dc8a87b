"""One request from its plan to its last step: checks before anything starts, the run folder, the phases."""
