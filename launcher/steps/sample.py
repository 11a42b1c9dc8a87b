"""``sample``: generates text with the exported model, one token at a time, in one process."""

from __future__ import annotations

import torch

from launcher.data.open import open_data
from launcher.job.schema.data import Text
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Sample
from launcher.steps import export
from launcher.steps.file_checks import RunFiles


def run_on_files(step: Sample, run: RunFiles) -> dict[str, float]:
    model = export.exported(run)
    run.say(f"sample:\n{sampled(run.job, step, model)}")
    return {}


@torch.no_grad()
def sampled(job: Job, step: Sample, model: torch.nn.Module) -> str:
    """Returns the prompt and its continuation.

    Tokens are drawn with the job's seed, so the text is repeatable.
    """
    assert isinstance(job.data, Text), "the planner refuses to sample without text data"
    data = open_data(job.data, seed=job.seed, allow=job.security.allow)
    assert data.encode is not None
    assert data.decode is not None

    # generate each token from the window before it
    model.eval()
    tokens = data.encode(step.prompt) or data.encode("\n")
    stream = torch.Generator().manual_seed(job.seed)
    for _ in range(step.tokens):
        window = torch.tensor([tokens[-job.data.seq_len :]])
        logits = model(window)[0, -1].double()
        if step.temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            shares = torch.softmax(logits / step.temperature, dim=-1)
            tokens.append(int(torch.multinomial(shares, 1, generator=stream)))
    return data.decode(tokens)
