"""Reads initial weights from a Hugging Face folder: each rank reads its own shards."""

from __future__ import annotations

from pathlib import Path

import torch

from launcher.checkpoint.foreign.cast import Cast, differing
from launcher.checkpoint.foreign.experts import joined
from launcher.checkpoint.foreign.hf_names import given
from launcher.checkpoint.foreign.hf_read import model_type, read_hf
from launcher.checkpoint.foreign.import_tensors import held
from launcher.checkpoint.full_tensors import Blobs, RenamedTensors
from launcher.checkpoint.layout.derived import taken
from launcher.errors import RunError
from launcher.job.schema.components import HuggingFace
from launcher.parallel.local import local
from launcher.plan.values.text import bytes_text
from launcher.runtime.training import state
from launcher.runtime.training.session import Session


@torch.no_grad()
def read(s: Session, model: HuggingFace) -> None:
    """Replaces the initial weights. Raises ``RunError`` for values that the model cannot represent."""
    blobs = Blobs(read_hf(Path(model.path)))
    target = taken(s.plan, blobs.specs)
    specs = {name: entry.spec for name, entry in target.entries.items()}
    whole = joined(blobs, model_type(Path(model.path)), specs)
    source = RenamedTensors(whole, given(whole.specs, target.named))
    wanted = {name: target.entries[first].spec for name, first in target.named.items()}
    cast = Cast(source, differing(source.specs, wanted))
    mine = {p.name: local(t.detach()) for p, t in s.model.named()}
    size = 0
    try:
        for name, blob in held(cast, target, s.world.rank):
            state.fill(mine[name], blob)
            size += blob.data.nbytes
    except ValueError as error:
        raise RunError(f"model.path: {model.path}: {error}") from error
    state.same_copies(s)
    if s.world.rank == 0:
        s.emit({"text": f"weights of {model.path}: rank 0 holds {bytes_text(size)} of them"})
