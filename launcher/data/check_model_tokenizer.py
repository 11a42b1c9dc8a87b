"""Checks that text is tokenized as a Hugging Face model expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from launcher.data import text_tokenizer
from launcher.data.text_tokenizer import TOKENIZER
from launcher.errors import Problem
from launcher.job.schema.components import Data, Model
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.models import HuggingFace

OLDER = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers that are not saved as one ``tokenizer.json``."""


def check_tokenizer(model: Model, data: Data) -> Iterator[Problem]:
    """Yields a problem if the tokenizer of the data differs from the one in the model's folder.

    If the weights in that folder are used and it has no tokenizer, a ``tokenizer_file`` is required.
    """
    if not isinstance(model, HuggingFace) or model.task != "causal_lm" or not isinstance(data, Text | Chat):
        return
    if not Path(model.path).is_dir():  # reported with the model's other files
        return
    own = Path(model.path) / TOKENIZER
    if data.tokenizer_file is not None:
        yield from _another(own, Path(data.tokenizer_file))
    elif own.is_file():
        text = f"{data.tokenizer}: {own} is the tokenizer of the model and has different tokens"
        yield Problem("data.tokenizer", text, _with_its_own(own, data))
    elif older := next((n for n in OLDER if (Path(model.path) / n).is_file()), None):
        text = (
            f"{data.tokenizer}: the tokenizer of the model is {Path(model.path) / older}, which is not read"
        )
        yield Problem(
            "data.tokenizer", f"{text}; save it as {TOKENIZER} first, as AutoTokenizer of transformers does"
        )
    elif model.weights:
        text = f"{data.tokenizer}: the weights in {model.path} were trained with a tokenizer, but the folder "
        text += "has none; give its file, or start from new weights"
        yield Problem("data.tokenizer", text, "model.weights=false")


def _with_its_own(own: Path, data: Text | Chat) -> str:
    """Returns the overrides that select the tokenizer in the model's folder; empty if it cannot be read."""
    words = ["data.tokenizer=file", f"data.tokenizer_file={quote(str(own))}"]
    vocab = _vocabulary(own)
    if vocab is None:
        return ""
    if isinstance(data, Text) or data.vocab_size is not None:
        words.append(f"data.vocab_size={1 + max(vocab.values(), default=0)}")
    return " ".join(words)


def _another(own: Path, used: Path) -> Iterator[Problem]:
    """Yields a problem if tokens of ``own`` have other ids in ``used``; ``used`` may have more tokens."""
    if not own.is_file() or not used.is_file() or own.samefile(used):
        return
    ours, theirs = _vocabulary(own), _vocabulary(used)
    if ours is None or theirs is None:
        return
    if unlike := [token for token, number in ours.items() if theirs.get(token) != number]:
        text = f"{used}: it has different ids for {len(unlike)} of the {len(ours)} tokens of {own}"
        yield Problem("data.tokenizer_file", text, f"data.tokenizer_file={quote(str(own))}")


def _vocabulary(file: Path) -> dict[str, int] | None:
    """Returns the id of each token; ``None`` for a file that is not a tokenizer, which its reader reports."""
    try:
        vocabulary: dict[str, int] = text_tokenizer.load(file).get_vocab(with_added_tokens=True)
    except (ValueError, OSError):
        return None
    return vocabulary
