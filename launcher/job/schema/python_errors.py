"""Converts the schema's validation errors to an error for callers in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem, RequestError, RequestKeyError, RequestTypeError
from launcher.job.schema.redact import HIDDEN, hidden

WORDS = {
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "finite_number": "should be a finite number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "string_type": "should be text",
    "string_unicode": "should be text in UTF-8",
    "string_too_short": "should not be empty",
    "string_pattern_mismatch": "should be letters, digits, '.', '_' and '-', starting with a letter or digit",
    "torch_name": "should be the name that torch uses, in lower case",
    "model_type": "should be a group of keys",
    "model_attributes_type": "should be a group of keys",
    "dict_type": "should be a group of keys",
    "tuple_type": "should be a list",
    "greater_than_equal": "should be at least {ge}",
    "greater_than": "should be more than {gt}",
    "less_than_equal": "should be at most {le}",
    "less_than": "should be less than {lt}",
    "too_long": "should have at most {max_length} items",
    "too_short": "should have at least {min_length} items",
    "extra_forbidden": "unknown key",
    "missing": "needs a value",
}
TYPES = ("_type", "_parsing", "int_from_float")


def request_error(error: ValidationError, data: Any) -> RequestError:
    """Makes an error with one problem per key of ``data``.

    It is also a ``TypeError`` if the type of a value is wrong, and a ``KeyError`` if every problem is a file
    name for which MindSpore raises one.
    """
    grouped: dict[tuple[str, ...], list[tuple[int, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        key, depth = _place(detail, data)
        grouped.setdefault(key, []).append((depth, detail))
    problems = tuple(_problem(".".join(key), details) for key, details in grouped.items())

    kinds = [max(details, key=lambda f: f[0])[1]["type"] for details in grouped.values()]
    if any(kind.endswith(TYPES) for kind in kinds) or any(map(_not_text, grouped.values())):
        return RequestTypeError(problems)
    if all(map(_is_key_error, grouped.values())):
        return RequestKeyError(problems)
    return RequestError(problems)


def _place(detail: ErrorDetails, data: Any) -> tuple[tuple[str, ...], int]:
    """Returns the parts of a key, without names of union members, and how deep in a list the error is."""
    loc = detail["loc"]
    parts: list[str] = []
    items = 0
    missing = detail["type"] == "missing"

    # descend into the data: a mapping, or a model that is already validated
    for i, part in enumerate(loc):
        if isinstance(part, int):
            items += 1
        elif items:
            continue
        elif isinstance(data, Mapping) and (part in data or (missing and i == len(loc) - 1)):
            parts.append(part)
            data = data.get(part)
        elif part in getattr(type(data), "model_fields", {}):
            parts.append(part)
            data = getattr(data, part)
    return tuple(parts), items


def _not_text(errors: list[tuple[int, ErrorDetails]]) -> bool:
    """Returns true if a key that accepts certain words got something other than text."""
    return any(d["type"] == "literal_error" and not isinstance(d["input"], str) for _, d in errors)


def _is_key_error(errors: list[tuple[int, ErrorDetails]]) -> bool:
    return all(isinstance(d.get("ctx", {}).get("error"), KeyError) for _, d in errors)


def _problem(key: str, errors: list[tuple[int, ErrorDetails]]) -> Problem:
    depth, detail = max(errors, key=lambda f: f[0])
    reasons = [reason(detail)] if depth else [reason(d) for _, d in errors]
    text = " or ".join([reasons[0], *(r.removeprefix("should be ") for r in reasons[1:])])
    if detail["type"] in ("missing", "extra_forbidden"):
        return Problem(key, text)
    value = HIDDEN if hidden(key, detail["input"]) else repr(detail["input"])
    at = "".join(f"[{i}]" for i in detail["loc"] if isinstance(i, int))
    shown = value if len(value) <= 60 else value[:57] + "..."
    return Problem(key, f"{f'item {at} = ' if at else ''}{shown}: {text}")


def reason(detail: ErrorDetails) -> str:
    """Describes the error in plain words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if isinstance(detail["input"], float) and detail["input"] != detail["input"]:
        return "should be a number"
    if kind == "literal_error":
        return f"should be {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        which = "a name, or with _target_" if context["discriminator"] == "_kind()" else "a kind"
        return f"should be a group of keys with {which}"
    if kind == "union_tag_invalid":
        tags = context["expected_tags"].replace("'", "").replace(", _target_", "")
        return f"unknown choice {context['tag']!r}; should be one of {tags}"
    text: str = detail["msg"]
    bounds = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return WORDS[kind].format(**bounds) if kind in WORDS else text[:1].lower() + text[1:]
