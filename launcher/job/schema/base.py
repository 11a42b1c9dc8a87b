"""The base class of all settings, frozen and strict, and the types of their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # pydantic's own advice to derive from it
from pydantic_core import PydanticKnownError

from launcher.errors import Problem, RequestTypeError
from launcher.job.schema.python_errors import request_error

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest integer that torch accepts, for example as a seed."""
Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
Index = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
"""The length of a tensor along one dim, or the size of a batch."""
Ranks = Annotated[int, Field(ge=1, le=100_000, strict=True)]
"""A number of ranks or of micro batches: a plan lists each of them."""
Many = Annotated[int, Field(ge=1, le=10_000, strict=True)]
"""A number of processes or runs, which are started one by one."""


def yaml_text(value: Any) -> str:
    """Returns a number, a switch or a word as YAML and overrides write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _no_switch(value: Any) -> Any:
    """Refuses true and false, which pydantic would read as 1.0 and 0.0."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


Number = Annotated[float, BeforeValidator(_no_switch)]
"""Any number, but neither true nor false; ``Fraction``, ``BelowOne`` and ``Rate`` are based on it."""
Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST, strict=True)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]
Rate = Annotated[Number, Field(ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Goal = Literal["min", "max"]


def _switched(value: Any) -> Any:
    """Returns ``value``, but all defaults for ``true`` and None for ``false``."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Switch = BeforeValidator(_switched)
"""Marks settings that are a mapping, true for all defaults, or left out."""


class RaisesRequestError(ModelMetaclass):
    """Raises ``RequestError`` for wrong settings in Python; pydantic builds nested ones in another way."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return _checked(super().__call__(*args, **kwargs))
        except ValidationError as error:
            raise request_error(error, kwargs) from error


class Settings(BaseModel, metaclass=RaisesRequestError):
    """Frozen settings without unknown names. Fields are in the order of reports and ``config.yaml``.

    In Python, a wrong value raises ``RequestError``, a ``ValueError``; a wrong type raises
    ``RequestTypeError``, which is also a ``TypeError``.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Makes settings from plain data. Raises the same errors as the constructor."""
        try:
            return _checked(super().model_validate(obj, **how))
        except ValidationError as error:
            raise request_error(error, obj) from error

    def value_problems(self) -> Iterable[Problem]:
        """Returns problems with values of the right type that their key does not accept.

        ``compose`` adds origins.
        """
        return ()


def _checked(made: T) -> T:
    """Returns ``made``, unless it has ``value_problems``. Raises ``RequestTypeError``."""
    if isinstance(made, Settings) and (problems := tuple(made.value_problems())):
        raise RequestTypeError(problems)
    return made
