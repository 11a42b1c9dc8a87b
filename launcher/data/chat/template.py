"""A tokenizer's chat template: renders a conversation as text and locates the assistant's turns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.data.chat.conversations import ASSISTANT, BadRow, Conversation, Message
from launcher.untrusted.bounded import TooLong, bounded

SECONDS, ROOM = 2.0, 128 << 20
"""The time in seconds and the memory in bytes that a template may use for one conversation.

Real templates use milliseconds and kilobytes.
"""
LARGE = 1000
START, END = "\ufdd0", "\ufdd1"
"""Mark the start and end of generated text during rendering: code points that no text contains."""

Span = tuple[int, int]


class _Generation(Extension):
    """The tag ``{% generation %}``, with which transformers marks what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 has it so)
    found = False  # set by the parser, so not for tags in comments or texts
    marks = True

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{START}{caller()}{END}" if self.marks else str(caller())


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products and powers that make a huge value: no time limit can interrupt one operation."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left) and _small(right)):
            raise TemplateError("a power of large numbers")
        if operator == "*" and not (_small(left) or _small(right)):
            raise TemplateError("a product of large values")
        return super().call_binop(context, operator, left, right)


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGE


def _beyond(error: BaseException) -> str:
    if isinstance(error, TooLong):
        return f"more than {SECONDS:g} s"
    if isinstance(error, MemoryError):
        return f"more than {ROOM >> 20} MiB"
    return "nested too deeply"


class ChatTemplate:
    """A compiled chat template. ``special``: the texts of special tokens by name, such as ``bos_token``.

    The environment is that of transformers, except that it has no current date: tokens must not change from
    day to day.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        self.source, self._special = source, special
        self._endless = ""

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
            raise ValueError(f"no template: {error.message}") from error
        except (RecursionError, MemoryError, TooLong, SyntaxError, OverflowError) as error:
            raise ValueError(f"no template: {_beyond(error)}") from error
        generation = env.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        return template, generation

    def compile(self) -> None:
        """Compiles the template now. Raises ``ValueError`` if it is not one."""
        _ = self._compiled

    def spans(self, said: Conversation) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of the assistant's messages from ``said.first`` on.

        A span contains the content and the token that ends the turn, without the blanks after it. Raises
        ``BadRow``.
        """
        whole = self._rendered(said, said.messages)
        if START in whole or END in whole:
            raise BadRow("it has a code point that no text has (U+FDD0 or U+FDD1)")
        if self._compiled[1].found:
            return whole, self._marked(said, whole)
        spans = [
            self._span(whole, said, i)
            for i, message in enumerate(said.messages)
            if i >= said.first and message["role"] == ASSISTANT
        ]
        return whole, spans

    def _marked(self, said: Conversation, whole: str) -> list[Span]:
        """The spans of ``{% generation %}``. Raises ``BadRow`` if the marks change the text."""
        text, spans = _unmarked(self._rendered(said, said.messages, marks=True))
        if text != whole:
            raise BadRow("the template changes what it has written in {% generation %}")
        before = self._rendered(said, said.messages[: said.first], prompt=True) if said.first else ""
        if not whole.startswith(before):
            raise BadRow("the template renders the prompt differently when its completion follows")
        return [(a, b) for a, b in spans if a >= len(before)]

    def _span(self, whole: str, said: Conversation, i: int) -> Span:
        """The span of message ``i``: where renderings with and without it differ. Raises ``BadRow``."""
        if not i:
            raise BadRow("the first message is the assistant's, so there is no prompt for it")
        before = self._rendered(said, said.messages[:i], prompt=True)
        after = self._rendered(said, said.messages[: i + 1])
        if not after.startswith(before):
            text = (
                "the template renders this turn differently from its generation prompt "
                "(add_generation_prompt)"
            )
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        if not whole.startswith(after):
            text = "the template renders it differently when other messages follow"
            raise BadRow(f"message {i}: {text}; mark it in the template with {{% generation %}}")
        content = said.messages[i]["content"]
        if content and after.endswith(content):
            return len(before), len(after)
        return len(before), max(len(before), len(after.rstrip()))

    def _rendered(
        self, said: Conversation, messages: Sequence[Message], *, prompt: bool = False, marks: bool = False
    ) -> str:
        """Renders ``messages`` with the tools of ``said``. Raises ``BadRow``."""
        if self._endless:
            raise BadRow(self._endless)
        template, generation = self._compiled
        generation.marks = marks
        try:
            with bounded(SECONDS, ROOM):
                return template.render(
                    messages=messages,
                    add_generation_prompt=prompt,
                    tools=said.tools,
                    documents=None,
                    **self._special,
                )
        except (RecursionError, MemoryError, TooLong) as error:
            self._endless = f"the template does not end: {_beyond(error)}"  # and on others: fail at once
            raise BadRow(self._endless) from error
        except Exception as error:  # a template's code can raise anything
            raise BadRow(f"the template refuses it: {error or type(error).__name__}") from error


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
    """``json.dumps`` as in transformers: without the HTML escapes that jinja2's own filter adds."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> None:
    raise TemplateError(text)
