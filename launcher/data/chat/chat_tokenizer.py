"""Tokenizes conversations, and marks the tokens that the assistant generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from launcher.data import text_tokenizer
from launcher.data.bounded_tokenizer import native_errors
from launcher.data.chat.conversation_files import BadRow, Conversation
from launcher.data.chat.template import ChatTemplate
from launcher.job.schema.data import Chat
from launcher.untrusted.files import LONGEST_TEXT, read_json, read_text

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
"""The file in which earlier versions of transformers saved special tokens."""
BYTES_END = 256
SHOWN = 60
"""The most characters of a turn that a plan shows."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of the byte tokenizer, which has no template itself."""

Labeled = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids, and a mask of the tokens that the assistant generates."""


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template.

    ``tokenizer`` is ``None`` for bytes. ``size`` is the size of the vocabulary. ``end`` is the token that
    ends a completion, if it is known. ``file`` is what errors call the tokenizer.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    size: int
    end: int | None
    file: str = text_tokenizer.TOKENIZER

    def labeled(self, conversation: Conversation) -> Labeled:
        """Encodes a conversation. A token belongs to the role of its first character. Raises ``BadRow``."""
        if not conversation.messages:
            return self._completed(conversation)
        if self.template is None:
            raise BadRow("it has messages, but the tokenizer has no chat template; give data.template=FILE")
        text, spans = self.template.spans(conversation)
        ids, starts = self._encoded(text)
        counted = np.zeros(len(ids), bool)
        for a, b in spans:
            counted |= (starts >= a) & (starts < b)
        return ids, counted

    def ends_a_turn(self, ids: NDArray[np.int64], counted: NDArray[np.bool_]) -> bool:
        """Returns true if a run of trained tokens ends with a special token. Always true for bytes."""
        if self.tokenizer is None:
            return True
        special = {self.end, *self.tokenizer.get_added_tokens_decoder()}
        return any(int(ids[stop - 1]) in special for _, stop in _runs(counted))

    def trained_text(self, ids: NDArray[np.int64], counted: NDArray[np.bool_]) -> str:
        """Returns the first two runs of trained tokens as short texts, and the number of the others."""
        texts = [self._text(ids[start:stop]) for start, stop in _runs(counted)]
        short = [t if len(t) <= SHOWN else f"{t[: SHOWN // 2]} ... {t[-SHOWN // 2 :]}" for t in texts]
        more = f" and {len(short) - 2} more turns" if len(short) > 2 else ""
        return " and ".join(repr(t) for t in short[:2]) + more

    def _text(self, ids: NDArray[np.int64]) -> str:
        if self.tokenizer is None:
            plain = bytes(i for i in ids.tolist() if i < BYTES_END).decode(errors="replace")
            return plain + "<end>" * (BYTES_END in ids)
        return text_tokenizer.decode(self.tokenizer, ids.tolist(), self.file)

    def _completed(self, conversation: Conversation) -> Labeled:
        """Encodes a prompt and its completion separately, as inference does."""
        if self.end is None:
            raise BadRow("a completion must end with a token, but the tokenizer's eos_token is unknown")
        before, after = (self._encoded(text)[0] for text in (conversation.prompt, conversation.completion))
        ids = np.concatenate([before, after, [self.end]])
        return ids, np.arange(len(ids)) >= len(before)

    def _encoded(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the token ids, and the index in ``text`` of each token's first character."""
        try:
            data = np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise BadRow("it has half a surrogate pair, which UTF-8 cannot encode") from error
        if self.tokenizer is None:
            widths = [len(c.encode()) for c in text]
            return data.astype(np.int64), np.repeat(np.arange(len(text)), widths)
        with native_errors(self.file):
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [a if b > a else -1 for a, b in encoding.offsets]
        return np.array(encoding.ids, np.int64), np.array(starts, np.int64)


def _runs(counted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], counted, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def chat_tokenizer(settings: Chat, *, tried: bool = False) -> ChatTokenizer:
    """Loads the tokenizer and its template. Raises ``ValueError`` if one is invalid, and ``OSError``.

    ``tried``: another process has tried the tokenizer.
    """
    if settings.tokenizer_file is None:
        plain = ChatTemplate(_template(settings, {}, CHATML), {})
        plain.compile()
        return ChatTokenizer(None, plain, BYTES_END + 1, BYTES_END)
    path = Path(settings.tokenizer_file)
    tokenizer = _without_truncation(text_tokenizer.load(path, tried=tried))
    config = _config(path)
    special = _special(config | _older(path, config))
    source = _template(settings, config, _beside(path))
    template = None
    if source:
        template = ChatTemplate(source, special)
        template.compile()
    size = text_tokenizer.vocab_size(tokenizer)
    eos = special.get("eos_token")
    end = None if eos is None else tokenizer.token_to_id(eos)
    return ChatTokenizer(tokenizer, template, size, end, str(path))


def _without_truncation(tokenizer: Tokenizer) -> Tokenizer:
    """Disables truncation, padding and post-processing, so that offsets cover the full text.

    Post-processors add special tokens, which the template already writes. Many also exclude whitespace from
    the offsets (``trim_offsets``): a token of only whitespace would then belong to no message.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.Sequence([])
    return tokenizer


def _template(settings: Chat, config: dict[str, Any], other: str) -> str:
    """Returns the source of the template: ``data.template``, else ``other``, else the one in ``config``."""
    if settings.template is not None:
        text = read_text(Path(settings.template), LONGEST_TEXT)
        return text if not settings.template.endswith(".json") else _named(_json(Path(settings.template)))
    return other or _named(config)


def _named(config: dict[str, Any]) -> str:
    """Returns the template of a config; if it has several, the one named ``default``."""
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default") or ""
    return template if isinstance(template, str) else ""


def _beside(path: Path) -> str:
    file = path.with_name(TEMPLATE)
    return read_text(file, LONGEST_TEXT) if file.is_file() else ""


def _config(path: Path) -> dict[str, Any]:
    file = path.with_name(CONFIG)
    return _json(file) if file.is_file() else {}


def _older(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns special tokens that earlier versions saved. As in transformers, they override ``config``."""
    file = path.with_name(SPECIAL_TOKENS)
    return _json(file) if file.is_file() and "added_tokens_decoder" not in config else {}


def _json(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of special tokens. A config has each as a string or as an object with settings."""
    texts = {
        k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")
    }
    return {k: v for k, v in texts.items() if isinstance(v, str)}
