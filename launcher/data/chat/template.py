"""A tokenizer's chat template: what a conversation is as text, and which of it the assistant says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.data.chat.conversations import BadRow, Message

START, END = "\ufdd0", "\ufdd1"
"""Around what is generated, while a template is rendered: code points that no text has."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")
ASSISTANT = "assistant"

Span = tuple[int, int]


class _Generation(Extension):
    """``{% generation %}``, which transformers has for what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 has it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{START}{caller()}{END}"


class ChatTemplate:
    """``special``: texts of special tokens by name, as ``bos_token``.

    The environment is that of transformers, but for the date of today: tokens are the same every day.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.source, self._special = source, special

    @cached_property
    def _template(self) -> Any:
        """Raises ``ValueError`` for what is no template."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = _refuse
        try:
            return env.from_string(self.source)
        except TemplateError as error:
            raise ValueError(f"no template: {error.message}") from error

    def compile(self) -> None:
        """Raises ``ValueError``."""
        _ = self._template

    def spans(self, messages: Sequence[Message], first: int = 0) -> tuple[str, list[Span]]:
        """The whole text, and where in it the assistant's messages from ``first`` on are.

        A span has the content and the token that ends the turn, without blanks after it. Raises ``BadRow``.
        """
        for message in messages:
            if START in message["content"] or END in message["content"]:
                raise BadRow("a message has a code point that no text has (U+FDD0 or U+FDD1)")
        whole = self._rendered(messages)
        if _GENERATION.search(self.source):
            return _unmarked(whole, len(self._plain(messages[:first])) if first else 0)
        spans = [
            self._span(whole, messages, i)
            for i, message in enumerate(messages)
            if i >= first and message["role"] == ASSISTANT
        ]
        return whole, spans

    def _span(self, whole: str, messages: Sequence[Message], i: int) -> Span:
        """Found by what the template makes of the messages before, and of those with it."""
        if not i:
            raise BadRow("the first message is the assistant's: nothing says what it answers")
        before = self._rendered(messages[:i], prompt=True)
        after = self._rendered(messages[: i + 1])
        if not after.startswith(before):
            text = "the template writes its turn otherwise than it asks for one (add_generation_prompt)"
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        if not whole.startswith(after):
            text = "the template writes it otherwise once other messages follow"
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        if after.endswith(messages[i]["content"]):
            return len(before), len(after)
        return len(before), max(len(before), len(after.rstrip()))

    def _plain(self, messages: Sequence[Message]) -> str:
        return _unmarked(self._rendered(messages, prompt=True), 0)[0]

    def _rendered(self, messages: Sequence[Message], prompt: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=prompt, tools=None, documents=None, **self._special
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise BadRow(f"the template refuses it: {error}") from error
        return text


def _unmarked(text: str, first: int) -> tuple[str, list[Span]]:
    """Without the marks, and where they were, from the place ``first`` on."""
    plain, spans, begun, length = [], [], 0, 0
    for part in re.split(f"([{START}{END}])", text):
        if part == START:
            begun = length
        elif part == END:
            spans.append((begun, length))
        else:
            plain.append(part)
            length += len(part)
    return "".join(plain), [(a, b) for a, b in spans if a >= first]


def _refuse(text: str) -> None:
    raise TemplateError(text)
