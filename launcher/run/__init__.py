"""One request from its plan to its last step: checks before anything starts, the run folder, the phases."""

__all__ = ["commands", "cures", "launch", "memory_check", "recipe_of_job", "run_job", "show"]
