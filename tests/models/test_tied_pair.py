"""The smallest model with a shared table."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from launcher.job.schema.models import TiedPair
from launcher.models.build import build_model


def test_the_tied_pair_multiplies_a_row_of_the_table_with_the_table():
    model = build_model(TiedPair(name="tied_pair", vocab_size=7, dim=3))
    tokens = torch.tensor([[1, 6]])
    table = model.embed.weight
    torch.testing.assert_close(model(tokens), F.linear(table[tokens], table))
