"""What will happen, as frozen values computed from a Job and the facts of a model.

No torch, no Hydra, no files, no environment: a plan can be made, printed and compared anywhere.
"""

__all__ = [
    "certify_copy",
    "changed_settings",
    "drill",
    "fits_machine",
    "lighter_layouts",
    "plan",
    "recompute_auto",
    "sample_checks",
    "show",
    "sizes",
    "step_order",
    "to_json",
    "verbs",
]
