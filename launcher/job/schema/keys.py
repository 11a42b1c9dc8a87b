"""The keys of the schema, with their types and the words that they accept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from launcher.job.schema.job import Job


def fields(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of a class by the name that a user writes."""
    return {f.alias or n: f for n, f in cls.model_fields.items()}


def typed(field: FieldInfo) -> Any:
    """Returns the annotation of a field, including its constraints."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def kinds(note: Any) -> dict[str, type[BaseModel]]:
    """Returns the members of a tagged union by tag; empty if ``note`` is anything else."""
    members = {}
    for member in _members(note):
        tag = next((m.tag for m in getattr(member, "__metadata__", ()) if isinstance(m, Tag)), None)
        if tag is not None:
            members[tag] = get_args(member)[0]
    return members


def settings(note: Any, value: Any) -> type[BaseModel] | None:
    """Returns the settings class for ``value`` at a key of type ``note``; ``None`` for a plain value."""
    tagged = kinds(note)
    if tagged:
        chooser = next((m for m in note.__metadata__ if isinstance(m, Discriminator)), None)
        tag = chooser.discriminator(value) if chooser and callable(chooser.discriminator) else None
        return tagged.get(tag) if isinstance(tag, str) else None
    classes = [c for c in map(_bare, _members(note)) if isinstance(c, type) and issubclass(c, BaseModel)]
    return classes[0] if classes else None


def below(note: Any, name: str, value: Any) -> Any:
    """Returns the annotation of key ``name`` in a node of type ``note`` with ``value``.

    Returns ``None`` if it has none.
    """
    cls = settings(note, value)
    if cls:
        field = fields(cls).get(name)
        return typed(field) if field else None
    return next((get_args(m)[1] for m in map(_bare, _members(note)) if get_origin(m) is dict), None)


def at(parts: Sequence[str], data: Any) -> Any:
    """Returns the annotation of a key, given as its parts, in ``data``.

    Returns ``None`` if the schema has no such key.
    """
    note: Any = Job
    for part in parts:
        if note is None:
            return None
        note = below(note, part, data)
        data = data.get(part) if isinstance(data, dict) else None
    return note


def field_at(parts: Sequence[str], data: Any) -> FieldInfo | None:
    """Returns the field of a key, with its default and description."""
    above = at(parts[:-1], data)
    for part in parts[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    cls = settings(above, data) if above is not None else None
    return fields(cls).get(parts[-1]) if cls else None


def names(parts: Sequence[str], data: Any) -> tuple[str, ...]:
    """Returns every name that may be set below a key; empty for an open node or a plain value."""
    note = at(parts, data)
    for part in parts:
        data = data.get(part) if isinstance(data, dict) else None
    cls = settings(note, data) if note is not None else None
    return tuple(fields(cls)) if cls else ()


def everywhere(note: Any = Job, above: str = "") -> Iterator[str]:
    """Yields every dotted key of the schema; keys repeat if several members of a union have them."""
    yield from (key for key, _ in noted(note, above))


def any_annotation(key: str) -> Any:
    """Returns the annotation of a key that any model, data set, optimizer or step has.

    Returns ``None`` if none has it.
    """
    return next((note for name, note in noted() if name == key), None)


def noted(note: Any = Job, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every dotted key with its annotation, for each member of a union."""
    for cls in kinds(note).values() or [c for c in [settings(note, None)] if c]:
        for name, field in fields(cls).items():
            key = f"{above}.{name}" if above else name
            yield key, typed(field)
            yield from noted(typed(field), key)


def accepts(note: Any, value: Any) -> bool:
    """Returns true if ``value`` is valid at a key of type ``note``."""
    try:
        TypeAdapter(note).validate_python(value)
    except ValidationError:
        return False
    return True


def literals(note: Any) -> tuple[Any, ...]:
    """Returns the words that a key accepts; empty if it accepts none."""
    return tuple(v for m in map(_bare, _members(note)) if get_origin(m) is Literal for v in get_args(m))


def _members(note: Any) -> tuple[Any, ...]:
    bare = _bare(note)
    if get_origin(bare) in (Union, UnionType):
        return tuple(m for m in get_args(bare) if m is not NoneType)
    return (note,)


def _bare(note: Any) -> Any:
    return get_args(note)[0] if get_origin(note) is Annotated else note
