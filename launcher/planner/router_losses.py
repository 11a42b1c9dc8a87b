"""Notes router losses that a model's config requests but the launcher does not train."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.plan.values.note import Note

ROUTER_LOSSES = (
    "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff",
)  # fmt: skip
"""Config keys with the weight of a router loss, if transformers computes the loss."""


def untrained_losses(job: Job) -> list[Note]:
    """Notes the losses in the config, with their weights."""
    if not isinstance(job.model, HuggingFace):
        return []
    from launcher.models.hugging_face import config_of

    config = config_of(job.model).get_text_config(decoder=True)
    named = [(key, getattr(config, key, None)) for key in ROUTER_LOSSES]
    losses = [f"{key} {value}" for key, value in named if isinstance(value, int | float) and value]
    text = f"{', '.join(losses)} of its config has no effect: the launcher trains no router loss"
    return [Note("model", text)] if losses else []
