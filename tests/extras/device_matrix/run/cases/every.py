"""All cases; every operator with a rule is in one of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.extras.device_matrix.run.cases.case import Case, positive, real
from tests.extras.device_matrix.run.cases.elementwise import ELEMENTWISE
from tests.extras.device_matrix.run.cases.layers_and_losses import ATTENTION, CONVOLUTIONS, DROPOUTS, LOOKUPS, LOSSES
from tests.extras.device_matrix.run.cases.products_and_views import PRODUCTS, VIEWS
from tests.extras.device_matrix.run.cases.reductions_and_norms import NORMS, REDUCTIONS

CASES = {
    **ELEMENTWISE,
    **PRODUCTS,
    **VIEWS,
    **REDUCTIONS,
    **NORMS,
    **ATTENTION,
    **CONVOLUTIONS,
    **LOOKUPS,
    **LOSSES,
    **DROPOUTS,
}
WITHOUT_RULE = {
    "random": Case(
        lambda x: (x.bernoulli(), F.alpha_dropout(x, 0.5, True), torch.multinomial(x[0], 2)), (positive(4, 6, 2),)
    ),
    "attention with dropout": Case(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (real(4, 6, 4),)),
}
