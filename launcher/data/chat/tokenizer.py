"""The tokenizer of conversations, with its chat template and its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from launcher.data.chat.conversations import BadRow, Conversation
from launcher.data.chat.template import ChatTemplate
from launcher.data.files import bpe
from launcher.job.schema.components import Chat
from launcher.untrusted.files import TEXT, read_json, read_text

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
BYTES_END = 256
SHOWN = 60
"""The number of characters of a turn that a plan shows."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of the byte tokenizer, which has none of its own."""

Labelled = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids, and a mask of those that the assistant says."""


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template.

    ``tokenizer``: ``None`` for bytes. ``end``: the token that ends a completion, if there is one.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    size: int
    end: int | None

    def labelled(self, said: Conversation) -> Labelled:
        """Encodes a conversation. A token belongs to whoever says its first character. Raises ``BadRow``."""
        if not said.messages:
            return self._completed(said)
        if self.template is None:
            raise BadRow("it has messages, and the tokenizer has no chat template; give data.template=FILE")
        text, spans = self.template.spans(said)
        ids, starts = self._encoded(text)
        counted = np.zeros(len(ids), bool)
        for a, b in spans:
            counted |= (starts >= a) & (starts < b)
        return ids, counted

    def ends_a_turn(self, ids: NDArray[np.int64], counted: NDArray[np.bool_]) -> bool:
        """Whether a stretch that is trained on ends with a special token. Always true for bytes."""
        if self.tokenizer is None:
            return True
        special = {self.end, *self.tokenizer.get_added_tokens_decoder()}
        return any(int(ids[stop - 1]) in special for _, stop in _runs(counted))

    def learnt(self, ids: NDArray[np.int64], counted: NDArray[np.bool_]) -> str:
        """Describes the text of each stretch that is trained on, shortened for people."""
        texts = [self._text(ids[start:stop]) for start, stop in _runs(counted)]
        short = [t if len(t) <= SHOWN else f"{t[: SHOWN // 2]} ... {t[-SHOWN // 2 :]}" for t in texts]
        more = f" and {len(short) - 2} turns more" if len(short) > 2 else ""
        return " and ".join(repr(t) for t in short[:2]) + more

    def _text(self, ids: NDArray[np.int64]) -> str:
        if self.tokenizer is None:
            plain = bytes(i for i in ids.tolist() if i < BYTES_END).decode(errors="replace")
            return plain + "<end>" * (BYTES_END in ids)
        text: str = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def _completed(self, said: Conversation) -> Labelled:
        """Encodes a prompt and its completion separately, as at inference."""
        if self.end is None:
            raise BadRow("a completion has to end with a token, and the tokenizer's eos_token is not known")
        before, after = (self._encoded(text)[0] for text in (said.prompt, said.completion))
        ids = np.concatenate([before, after, [self.end]])
        return ids, np.arange(len(ids)) >= len(before)

    def _encoded(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the token ids, and the index in ``text`` of each token's first character."""
        try:
            data = np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise BadRow("it has half a surrogate pair, which no UTF-8 can have") from error
        if self.tokenizer is None:
            widths = [len(c.encode()) for c in text]
            return data.astype(np.int64), np.repeat(np.arange(len(text)), widths)
        found = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [a if b > a else -1 for a, b in found.offsets]
        return np.array(found.ids, np.int64), np.array(starts, np.int64)


def _runs(counted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], counted, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def chat_tokenizer(settings: Chat) -> ChatTokenizer:
    """Loads the tokenizer and its template. Raises ``ValueError`` if one is invalid, and ``OSError``."""
    if settings.tokenizer_file is None:
        plain = ChatTemplate(_template(settings, {}, CHATML), {})
        plain.compile()
        return ChatTokenizer(None, plain, BYTES_END + 1, BYTES_END)
    path = Path(settings.tokenizer_file)
    tokenizer = _whole(bpe.load(path))
    config = _config(path)
    special = _special(config)
    source = _template(settings, config, _beside(path))
    template = None
    if source:
        template = ChatTemplate(source, special)
        template.compile()
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    eos = special.get("eos_token")
    return ChatTokenizer(tokenizer, template, size, None if eos is None else tokenizer.token_to_id(eos))


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Disables truncation, padding and post-processing, so that offsets cover the full text.

    Post-processors add special tokens, which the template already writes. Many also leave blanks out of the
    offsets (``trim_offsets``): a token of blanks only would then belong to no message.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.Sequence([])
    return tokenizer


def _template(settings: Chat, config: dict[str, Any], other: str) -> str:
    """The source of the template: that of ``data.template``, else ``other``, else that of the config."""
    if settings.template is not None:
        text = read_text(Path(settings.template), TEXT)
        return text if not settings.template.endswith(".json") else _named(_json(Path(settings.template)))
    return other or _named(config)


def _named(config: dict[str, Any]) -> str:
    """The template of a config; if it has several, the one named ``default``."""
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        by_name = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = by_name.get("default") or ""
    return found if isinstance(found, str) else ""


def _beside(path: Path) -> str:
    file = path.with_name(TEMPLATE)
    return read_text(file, TEXT) if file.is_file() else ""


def _config(path: Path) -> dict[str, Any]:
    file = path.with_name(CONFIG)
    return _json(file) if file.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no object")
    return found


def _special(config: dict[str, Any]) -> dict[str, str]:
    """The texts of special tokens. A config gives each as a string or as an object with settings."""
    texts = {
        k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")
    }
    return {k: v for k, v in texts.items() if isinstance(v, str)}
