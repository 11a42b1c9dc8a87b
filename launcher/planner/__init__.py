"""From a request to its plan: its files are read, the model is built without memory, ``plan`` decides."""

__all__ = ["loaded_param_layouts", "plan_job", "trace_model", "train_steps", "trial_samples", "user_classes"]
