"""Encodes values as JSON between ranks, and decodes them by the types that our own classes declare.

A message contains values only; it never decides which class is built. So a forged message can at worst change
values; unlike a pickle it cannot run code.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from launcher.errors import RunError

_PLAIN = (str, int, float, bool)


class Unsuitable(RunError):
    """A value or a message that does not have the declared type."""


@dataclass(frozen=True)
class _Codec:
    """``fits``: a quick check of whether a value has the type; it distinguishes the members of a union."""

    fits: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode(value: object, kind: Any) -> bytes:
    """``value`` of type ``kind`` as JSON. Raises ``Unsuitable`` if ``kind`` does not declare its content."""
    return json.dumps(_codec(kind, "").encode(value), separators=(",", ":")).encode()


def decode(body: bytes, kind: Any) -> Any:
    """The ``kind`` that ``encode`` wrote. Raises ``Unsuitable`` for anything else."""
    try:
        return _codec(kind, "").decode(json.loads(body))
    except Unsuitable:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unsuitable(f"no message between ranks: {error}") from error


@cache
def _codec(kind: Any, module: str) -> _Codec:
    """The codec of a type; ``module``: where the annotation ``kind`` stands, to resolve names of types."""
    if isinstance(kind, str | ForwardRef):
        name = kind if isinstance(kind, str) else kind.__forward_arg__
        return _codec(eval(name, vars(sys.modules[module])), module)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _codec(inner[0], module)
    if origin is Literal:
        return _leaf(lambda value: value in inner, str(kind))
    if origin in (Union, types.UnionType):
        return _union(inner, module)
    if origin is tuple:
        return _tuple(inner, module)
    if origin in (list, Sequence):
        return _many(list, _later(inner[0], module), lambda value: isinstance(value, list | tuple))
    if origin in (frozenset, set):
        return _many(origin, _later(inner[0], module), lambda value: isinstance(value, frozenset | set))
    if origin in (dict, Mapping):
        return _mapping(_later(inner[0], module), _later(inner[1], module))
    if kind is Any or kind is object:
        return _Codec(lambda _: True, _any, lambda value: value)
    if kind is type(None):
        return _leaf(lambda value: value is None, "None")
    if isinstance(kind, type):
        return _class(kind)
    raise Unsuitable(f"{kind} is no type that is sent between ranks")


def _class(kind: type) -> _Codec:
    if kind is float:
        return _leaf(lambda value: type(value) in (int, float), "float")
    if kind in _PLAIN:
        return _leaf(lambda value: type(value) is kind, kind.__name__)
    if kind is complex:
        return _Codec(lambda v: type(v) is complex, lambda v: [v.real, v.imag], lambda data: complex(*data))
    if issubclass(kind, Path):
        return _Codec(lambda v: isinstance(v, Path), str, lambda data: Path(_text(data)))
    if issubclass(kind, BaseModel):
        return _settings(kind)
    if is_dataclass(kind):
        return _record(kind, tuple(f.name for f in fields(kind)))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _record(kind, kind._fields)
    raise Unsuitable(f"{kind.__name__} is no type that is sent between ranks")


def _text(data: Any) -> str:
    if type(data) is not str:
        raise Unsuitable(f"{data!r:.80} where a text is expected")
    return data


def _leaf(fits: Callable[[Any], bool], name: str) -> _Codec:
    def same(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{value!r:.80} where {name} is expected")
        return value

    return _Codec(fits, same, same)


def _later(kind: Any, module: str) -> Callable[[], _Codec]:
    """Resolves a type when it is used, as types may contain themselves."""
    return lambda: _codec(kind, module)


def _union(members: Sequence[Any], module: str) -> _Codec:
    """Encodes the index of the matching member, and the value."""
    laters = [_later(member, module) for member in members]

    def number(value: Any) -> int:
        for i, codec in enumerate(laters):
            if codec().fits(value):
                return i
        raise Unsuitable(f"{type(value).__name__} is none of what is expected: {members}")

    def put(value: Any) -> Any:
        i = number(value)
        return [i, laters[i]().encode(value)]

    def got(data: Any) -> Any:
        i, value = data
        if type(i) is not int or not 0 <= i < len(laters):
            raise Unsuitable(f"{i!r:.80} counts none of {members}")
        return laters[i]().decode(value)

    return _Codec(lambda value: any(codec().fits(value) for codec in laters), put, got)


def _many(make: Callable[[Any], Any], each: Callable[[], _Codec], fits: Callable[[Any], bool]) -> _Codec:
    def got(data: Any) -> Any:
        return make([each().decode(one) for one in _list(data)])

    def put(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{type(value).__name__} where many values are expected")
        return [each().encode(one) for one in value]

    return _Codec(fits, put, got)


def _tuple(inner: Sequence[Any], module: str) -> _Codec:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return _many(tuple, _later(inner[0], module), lambda value: isinstance(value, tuple))
    laters = [_later(one, module) for one in inner]

    def fits(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == len(laters)

    def put(value: Any) -> Any:
        if not fits(value):
            raise Unsuitable(f"{value!r:.80} where {len(laters)} values are expected")
        return [codec().encode(one) for codec, one in zip(laters, value, strict=True)]

    def got(data: Any) -> Any:
        return tuple(codec().decode(one) for codec, one in zip(laters, _list(data), strict=True))

    return _Codec(fits, put, got)


def _mapping(key: Callable[[], _Codec], item: Callable[[], _Codec]) -> _Codec:
    def put(value: Any) -> Any:
        return [[key().encode(k), item().encode(v)] for k, v in value.items()]

    def got(data: Any) -> Any:
        return {key().decode(k): item().decode(v) for k, v in _list(data)}

    return _Codec(lambda value: isinstance(value, Mapping), put, got)


def _record(kind: Any, names: Sequence[str]) -> _Codec:
    """Encodes the field values of a class, in the order of its fields."""

    @cache
    def codecs() -> list[_Codec]:
        hints = get_type_hints(kind, include_extras=True)
        return [_codec(hints[name], kind.__module__) for name in names]

    def put(value: Any) -> Any:
        if type(value) is not kind:
            raise Unsuitable(f"{type(value).__name__} where {kind.__name__} is expected")
        return [codec.encode(getattr(value, name)) for name, codec in zip(names, codecs(), strict=True)]

    def got(data: Any) -> Any:
        each = zip(names, codecs(), _list(data), strict=True)
        return kind(**{name: codec.decode(one) for name, codec, one in each})

    return _Codec(lambda value: type(value) is kind, put, got)


def _settings(kind: Any) -> _Codec:
    """Encodes settings unvalidated: they were validated when they were made, and may have changed since."""

    @cache
    def codecs() -> dict[str, _Codec]:
        hints = get_type_hints(kind, include_extras=True)
        return {name: _codec(hints[name], kind.__module__) for name in kind.model_fields}

    def put(value: Any) -> Any:
        if type(value) is not kind:
            raise Unsuitable(f"{type(value).__name__} where {kind.__name__} is expected")
        known = [codec.encode(getattr(value, name)) for name, codec in codecs().items()]
        return [known, _any(dict(value.model_extra or {})), sorted(value.model_fields_set)]

    def got(data: Any) -> Any:
        known, more, given = data
        made = {n: c.decode(one) for (n, c), one in zip(codecs().items(), _list(known), strict=True)}
        if more and kind.model_config.get("extra") != "allow":
            raise Unsuitable(f"{kind.__name__} has no {', '.join(more)}")
        names = {by for n, f in kind.model_fields.items() for by in (n, f.alias)} & {*more}
        if names:
            raise Unsuitable(f"{kind.__name__} is told {', '.join(map(str, names))} twice")
        by_alias = {kind.model_fields[name].alias or name: value for name, value in made.items()}
        return kind.model_construct({_text(one) for one in given}, **by_alias, **more)

    return _Codec(lambda value: type(value) is kind, put, got)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise Unsuitable(f"{type(data).__name__} where a list is expected")
    return data


def _any(value: Any) -> Any:
    """Plain data that a user supplied, as in YAML."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [_any(one) for one in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _any(one) for key, one in value.items()}
    raise Unsuitable(f"{type(value).__name__} is no plain data, and is not sent between ranks")
