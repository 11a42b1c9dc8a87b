"""Renders conversations by chat templates."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.data.chat.conversation_files import ASSISTANT, CALLS, BadRow, Conversation, Message
from launcher.untrusted.bounded import TooLong, bounded

SECONDS, ROOM = 2.0, 128 << 20
"""The time in seconds and the memory in bytes that a template may use for one conversation.

Real templates use milliseconds and kilobytes.
"""
TOTAL = 10.0
"""The time in seconds that a template may use for all conversations that a plan checks."""
LARGEST_NUMBER = 1000
START, END = "\ufdd0", "\ufdd1"
"""Code points that mark the start and end of generated text during rendering; no text contains them."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages have the reasoning before an answer; each template knows some of them or none."""

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
        self._check_calls(rendered, conversation)
        if self._compiled[1].in_use:
            return rendered, self._marked(conversation, rendered)
        spans = [
            self._span(rendered, conversation, i)
            for i, message in enumerate(conversation.messages)
            if i >= conversation.first and message["role"] == ASSISTANT
        ]
        return rendered, spans

    def _check_calls(self, rendered: str, conversation: Conversation) -> None:
        """Raises ``BadRow`` if the rendered text lacks the calls of a message, or has other words for them.

        A template may know no calls, may write them only where a message has no content, or may write
        ``None`` for a missing content. It may also encode arguments that are JSON already once more.
        """
        messages = conversation.messages
        for i, message in enumerate(messages):
            if not (calls := message.get(CALLS)):
                continue
            empty = {"role": message["role"], "content": message.get("content") or ""}
            if self._rendered_or_none(conversation, i, empty) == rendered:
                raise BadRow(f"message {i}: the template does not write its {CALLS}")
            for text in map(_arguments, calls if isinstance(calls, list) else ()):
                if text and (_as_json(text) in rendered or json.dumps(text) in rendered):
                    raise BadRow(
                        f"message {i}: the template encodes the arguments of a call, which are JSON already, "
                        "a second time; write them as an object"
                    )
            if message.get("content") is None:
                other = self._rendered_or_none(conversation, i, {**message, "content": ""})
                if other is not None and rendered.count("None") > other.count("None"):
                    raise BadRow(
                        f"message {i}: the template writes None for its content; write an empty text"
                    )

    def unwritten_reasoning(self, conversation: Conversation) -> list[str]:
        """Returns the keys with reasoning of the assistant that the text lacks. Raises ``BadRow``.

        A template may leave out the reasoning of all turns but the last.
        """
        every = [m for m in conversation.messages if m["role"] == ASSISTANT]
        rendered = self._rendered(conversation, conversation.messages) if every else ""
        texts = {key: [m[key].strip() for m in every if isinstance(m.get(key), str)] for key in REASONING}
        return [key for key, own in texts.items() if any(own) and not any(t and t in rendered for t in own)]

    def _rendered_or_none(self, conversation: Conversation, i: int, message: Message) -> str | None:
        """Renders the conversation with ``message`` at index ``i``; ``None`` if the template refuses it."""
        messages = conversation.messages
        try:
            return self._rendered(conversation, (*messages[:i], message, *messages[i + 1 :]))
        except TemplateLimit:
            raise
        except BadRow:
            return None

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
        content = conversation.messages[i].get("content")
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


def _arguments(call: Any) -> str:
    """Returns the arguments of a function call if they are the JSON text of an object, otherwise ""."""
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) and arguments.lstrip().startswith("{") else ""


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
