"""The models, by what is odd about them: plain torch, without imports of the project's code."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec

THEMES = (
    "grad_modes", "functions", "hooks", "aliases", "ties", "state", "norms", "embeddings", "parameters", "choices",
    "values", "containers", "blocks", "features", "references", "oddities", "uses", "flows",
    "memos", "names", "outside",
)  # fmt: skip
NEEDS = {"theirs": "transformers"}


def load() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated but still in use
        for theme in THEMES:
            import_module(f"{__name__}.{theme}")
        for theme, package in NEEDS.items():
            if find_spec(package) is not None:
                import_module(f"{__name__}.{theme}")
