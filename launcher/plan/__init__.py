"""What will happen, as frozen values computed from a Job and the facts of a model.

No torch, no Hydra, no files, no environment: a plan can be made, printed and compared anywhere.
"""

__all__ = [
    "certify_copy",
    "drill",
    "fits_free_memory",
    "lighter_layouts",
    "may_change_on_resume",
    "outputs_and_targets",
    "plan",
    "recompute_auto",
    "sizes",
    "step_order",
    "verbs",
]
