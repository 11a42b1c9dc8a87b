"""Sets the number of tokens, if the request leaves it to the files of its data."""

from __future__ import annotations

from launcher.data.chat.tokens import vocabulary
from launcher.data.spec import vocab
from launcher.data.tokens.corpus import vocab_size
from launcher.job.schema.components import Chat, LanguageModel, TiedPair, Tokens
from launcher.job.schema.job import Job


class FromFiles(int):
    """A ``data.vocab_size`` that was read from files: from headers of token files, or from a tokenizer."""

    why = "as the headers of its files say"


def with_vocabulary(job: Job) -> Job:
    """Returns ``job`` with ``data.vocab_size`` and ``model.vocab_size``, if they are null and the files tell.

    Problems with the files are left to their checks.
    """
    data, model = job.data, job.model
    if isinstance(data, Tokens | Chat) and data.vocab_size is None:
        said = _said(data)
        if said is not None:
            data = data.model_copy(update={"vocab_size": said})
    tokens = vocab(data)
    if isinstance(model, LanguageModel | TiedPair) and model.vocab_size is None and tokens is not None:
        model = model.model_copy(update={"vocab_size": int(tokens)})
    if data is job.data and model is job.model:
        return job
    return job.model_copy(update={"data": data, "model": model})


def _said(data: Tokens | Chat) -> FromFiles | None:
    found = vocab_size(data) if isinstance(data, Tokens) else vocabulary(data)
    if found is None:
        return None
    out = FromFiles(found)
    if isinstance(data, Chat):
        out.why = "as many as its tokenizer has"
    return out


def note(job: Job) -> str | None:
    """A note with the key and its value, if it was read from files."""
    said = vocab(job.data)
    if not isinstance(said, FromFiles):
        return None
    return f"data.vocab_size null -> {said}: {said.why}"
