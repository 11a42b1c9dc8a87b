"""The base of every settings model: frozen, no unknown keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # pydantic's own advice to derive from it

from launcher.errors import Problem, RequestTypeError
from launcher.job.schema.python_errors import request_error

T = TypeVar("T")

Count = Annotated[int, Field(ge=1, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Goal = Literal["min", "max"]


def _switched(value: Any) -> Any:
    """``true`` is all defaults, ``false`` is none."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Switch = BeforeValidator(_switched)
"""Of settings that are given as a mapping, switched on with all defaults, or left out."""


class _Loud(ModelMetaclass):
    """Raises our error for wrong settings made in Python; nested ones are validated without this call."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return _together(super().__call__(*args, **kwargs))
        except ValidationError as error:
            raise request_error(error, kwargs) from error


class Settings(BaseModel, metaclass=_Loud):
    """Frozen, no unknown names; fields are in the order of reports and of ``config.yaml``.

    In Python, a wrong value raises ``RequestError``, a ``ValueError``; a wrong type ``RequestTypeError``, a
    ``TypeError`` too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Settings from plain data. Raises the same errors as the constructor."""
        try:
            return _together(super().model_validate(obj, **how))
        except ValidationError as error:
            raise request_error(error, obj) from error

    def unfit(self) -> Iterable[Problem]:
        """Values of the right form that are none of their key, which ``compose`` tells with their lines."""
        return ()


def _together(made: T) -> T:
    """``made``, unless it has values that are ``unfit``. Raises ``RequestTypeError``."""
    if isinstance(made, Settings) and (problems := tuple(made.unfit())):
        raise RequestTypeError(problems)
    return made
