"""Renders conversations by chat templates, and tokenizes them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from launcher.data import text_tokenizer
from launcher.data.bounded_tokenizer import native_errors
from launcher.data.chat.conversation_files import ASSISTANT, BadRow, Conversation, Message
from launcher.job.schema.data import Chat
from launcher.untrusted.bounded import TooLong, bounded
from launcher.untrusted.files import LONGEST_TEXT, read_json, read_text

SECONDS, ROOM = 2.0, 128 << 20
"""The time in seconds and the memory in bytes that a template may use for one conversation.

Real templates use milliseconds and kilobytes.
"""
TOTAL = 10.0
"""The time in seconds that a template may use for all conversations that a plan checks."""
LARGEST_NUMBER = 1000
START, END = "\ufdd0", "\ufdd1"
"""Code points that mark the start and end of generated text during rendering; no text contains them."""

Span = tuple[int, int]


class _Generation(Extension):
    """The tag ``{% generation %}``, with which transformers marks the text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 requires)
    in_use = False  # set by the parser, so not for tags in comments or texts
    marks = True

    def parse(self, parser: Parser) -> nodes.Node:
        self.in_use = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{START}{caller()}{END}" if self.marks else str(caller())


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products and powers with a huge result: a time limit cannot interrupt a single operation."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left) and _small(right)):
            raise TemplateError("a power of large numbers")
        if operator == "*" and not (_small(left) or _small(right)):
            raise TemplateError("a product of large values")
        return super().call_binop(context, operator, left, right)


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST_NUMBER


def _beyond(error: BaseException) -> str:
    if isinstance(error, TooLong):
        return f"more than {SECONDS:g} s"
    if isinstance(error, MemoryError):
        return f"more than {ROOM >> 20} MiB"
    return "nested too deeply"


class TemplateLimit(BadRow):
    """Raised if the template exceeds a limit. This is no fault of the row."""


TOO_SLOW = f"the template is too slow: more than {TOTAL:g} s for the first conversations"


class ChatTemplate:
    """A chat template. ``special`` has the texts of special tokens by name, such as ``bos_token``.

    The environment is the same as in transformers, except that it has no current date: tokens must not change
    from day to day.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.source, self._special = source, special
        self._endless = ""
        self._left = math.inf

    def limit_total(self, seconds: float) -> None:
        """Limits the time of all renderings together, from now on."""
        self._left = seconds

    @cached_property
    def _compiled(self) -> tuple[Template, _Generation]:
        """Compiles the source. Raises ``ValueError`` if it is not a template."""
        env = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _as_json
        env.globals["raise_exception"] = _refuse
        try:
            with bounded(SECONDS, ROOM):
                template = env.from_string(self.source)
        except TemplateError as error:
            raise ValueError(f"not a template: {error.message}") from error
        except (RecursionError, MemoryError, TooLong, SyntaxError, OverflowError) as error:
            raise ValueError(f"not a template: {_beyond(error)}") from error
        generation = env.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        return template, generation

    def compile(self) -> None:
        """Compiles the template now. Raises ``ValueError`` if it is not valid."""
        _ = self._compiled

    def spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Returns the rendered text, and the spans of the assistant messages from ``conversation.first`` on.

        A span contains the content and the token that ends the turn, without the whitespace after it. Raises
        ``BadRow``.
        """
        rendered = self._rendered(conversation, conversation.messages)
        if START in rendered or END in rendered:
            raise BadRow("it has a code point that is not text (U+FDD0 or U+FDD1)")
        if self._compiled[1].in_use:
            return rendered, self._marked(conversation, rendered)
        spans = [
            self._span(rendered, conversation, i)
            for i, message in enumerate(conversation.messages)
            if i >= conversation.first and message["role"] == ASSISTANT
        ]
        return rendered, spans

    def _marked(self, conversation: Conversation, rendered: str) -> list[Span]:
        """Returns the spans of ``{% generation %}``. Raises ``BadRow`` if the marks change the text."""
        text, spans = _unmarked(self._rendered(conversation, conversation.messages, marks=True))
        if text != rendered:
            raise BadRow("the template changes the text that it has written in {% generation %}")
        before = (
            self._rendered(conversation, conversation.messages[: conversation.first], prompt=True)
            if conversation.first
            else ""
        )
        if not rendered.startswith(before):
            raise BadRow("the template renders the prompt differently when its completion follows")
        return [(a, b) for a, b in spans if a >= len(before)]

    def _span(self, rendered: str, conversation: Conversation, i: int) -> Span:
        """Returns the span in which renderings with and without message ``i`` differ. Raises ``BadRow``."""
        if not i:
            raise BadRow("the first message is the assistant's, so it has no prompt")
        before = self._rendered(conversation, conversation.messages[:i], prompt=True)
        after = self._rendered(conversation, conversation.messages[: i + 1])
        if not after.startswith(before):
            text = (
                "the template renders this turn differently from its generation prompt "
                "(add_generation_prompt)"
            )
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        if not rendered.startswith(after):
            text = "the template renders it differently when other messages follow"
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        content = conversation.messages[i]["content"]
        if content and after.endswith(content):
            return len(before), len(after)
        return len(before), max(len(before), len(after.rstrip()))

    def _rendered(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> str:
        """Renders ``messages`` with the tools of ``conversation``. Raises ``BadRow``."""
        template, generation = self._compiled
        generation.marks = marks
        seconds = min(SECONDS, self._left)
        if seconds <= 0:
            self._endless = self._endless or TOO_SLOW
        if self._endless:
            raise TemplateLimit(self._endless)
        start = time.monotonic()
        try:
            with bounded(seconds, ROOM):
                return template.render(
                    messages=messages,
                    add_generation_prompt=prompt,
                    tools=conversation.tools,
                    documents=None,
                    **self._special,
                )
        except (RecursionError, MemoryError, TooLong) as error:
            # later conversations fail at once
            slow = isinstance(error, TooLong) and seconds < SECONDS
            self._endless = TOO_SLOW if slow else f"the template does not end: {_beyond(error)}"
            raise TemplateLimit(self._endless) from error
        except Exception as error:  # a template's code can raise anything
            raise BadRow(f"the template raises an error: {error or type(error).__name__}") from error
        finally:
            self._left -= time.monotonic() - start


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Removes the marks; returns the text and the spans that they enclosed."""
    plain, spans, begun, length = [], [], 0, 0
    for part in re.split(f"([{START}{END}])", text):
        if part == START:
            begun = length
        elif part == END:
            spans.append((begun, length))
        else:
            plain.append(part)
            length += len(part)
    return "".join(plain), spans


def _as_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Calls ``json.dumps`` as transformers does: without the HTML escapes of jinja2's own filter."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> None:
    raise TemplateError(text)


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
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
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
