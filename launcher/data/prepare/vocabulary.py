"""The vocabulary of the tokenizer that encodes a corpus, and the token that ends a document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from launcher.data import text_tokenizer
from launcher.job.schema.steps import Prepare
from launcher.untrusted.files import read_json

TRAINED_END = "<|endoftext|>"  # ends documents if BPE is trained here and the settings name no other token
BYTES_END = 256
SHOWN = 6  # tokens listed in a message


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.json, or ``None`` for bytes, and its end token. Every token is below ``size``."""

    tokenizer: str | None
    size: int
    end: int
    end_text: str


class NoEnd(ValueError):
    """Raised if the token that ends a document is unknown."""


def vocabulary(settings: Prepare, trained: str | None = None) -> Vocabulary:
    """Returns the vocabulary of the tokenizer that ``settings`` name, or of the ``trained`` tokenizer.json.

    Raises ``ValueError`` for a file that is not a tokenizer, and ``NoEnd``.
    """
    if settings.tokenizer == "bytes":
        return Vocabulary(None, BYTES_END + 1, BYTES_END, "end of document")
    if settings.tokenizer_file is None:
        assert trained is not None
        return _vocabulary_of(Tokenizer.from_str(trained), trained_end(settings))
    path = Path(settings.tokenizer_file)
    tokenizer = text_tokenizer.load(path)
    return _vocabulary_of(tokenizer, settings.end_of_document or _beside(path, tokenizer), path)


def trained_end(settings: Prepare) -> str:
    """Returns the text of the end token if BPE is trained here."""
    return settings.end_of_document or TRAINED_END


def _vocabulary_of(tokenizer: Tokenizer, end: str, path: Path | None = None) -> Vocabulary:
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise NoEnd(f"{end}: {path} has no such token; {_special(tokenizer)}")
    size = text_tokenizer.vocab_size(tokenizer)
    return Vocabulary(str(tokenizer.to_str()), size, int(end_id), end)


def _beside(path: Path, tokenizer: Tokenizer) -> str:
    """Returns the end-of-text token in the files of transformers next to ``path``. Raises ``NoEnd``."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = path.with_name(name)
        if beside.is_file():
            content = read_json(beside)
            token = content.get("eos_token") if isinstance(content, dict) else None
            if text := _text(token):
                if tokenizer.token_to_id(text) is None:
                    raise NoEnd(f"null: {beside} names {text}, which {path} lacks; {_special(tokenizer)}")
                return text
    files = "tokenizer_config.json with an eos_token"
    raise NoEnd(
        f"null: {path} has no {files} next to it; name the token that ends a document; {_special(tokenizer)}"
    )


def _text(token: Any) -> str:
    """Returns the text of a token, which a file has as a string or as an object with settings."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _special(tokenizer: Tokenizer) -> str:
    added = tokenizer.get_added_tokens_decoder()
    names = [added[i].content for i in sorted(added) if added[i].special]
    if not names:
        return "it has no special tokens"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"its special tokens: {', '.join(names[:SHOWN])}{more}"
