"""Sets the vocabulary size from the data's files, if the request does not set it."""

from __future__ import annotations

from launcher.data.spec import vocab
from launcher.data.tokens.corpus import vocab_size
from launcher.job.schema.data import Chat, Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel, TiedPair

HEADERS, TOKENIZER = "as the headers of its files say", "as many as its tokenizer has"


def with_vocabulary(job: Job) -> tuple[Job, str]:
    """Returns ``job`` with ``data.vocab_size`` and ``model.vocab_size`` set, if they are null and known.

    Also returns the source of ``data.vocab_size`` as text, or "" if it was not read from files. Problems with
    the files are reported by their own checks.
    """
    data, model, source = job.data, job.model, ""
    if isinstance(data, Tokens | Chat) and data.vocab_size is None:
        size = vocab_size(data) if isinstance(data, Tokens) else _vocabulary(data)
        if size is not None:
            data = data.model_copy(update={"vocab_size": size})
            source = HEADERS if isinstance(data, Tokens) else TOKENIZER
    tokens = vocab(data)
    if isinstance(model, LanguageModel | TiedPair) and model.vocab_size is None and tokens is not None:
        model = model.model_copy(update={"vocab_size": tokens})
    if data is job.data and model is job.model:
        return job, source
    return job.model_copy(update={"data": data, "model": model}), source


def _vocabulary(data: Chat) -> int | None:
    """Returns the number of tokens of the tokenizer of ``data=chat``."""
    from launcher.data.chat.tokens import vocabulary  # imports jinja2, which takes 80 ms

    return vocabulary(data)
