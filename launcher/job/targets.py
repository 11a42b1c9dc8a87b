"""Finds, checks and builds the user's own classes, which a request names by ``_target_``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from launcher.errors import Problem, RequestError, of_users
from launcher.job.schema.components import Target
from launcher.job.schema.similar_names import did_you_mean, nearest

T = TypeVar("T")
OWN = "launcher"


def refusal(path: str, allow: tuple[str, ...]) -> tuple[str, str] | None:
    """Why the dotted ``path`` is not allowed, and the cure; ``None`` when it is. Imports nothing."""
    parts = path.split(".")
    if len(parts) < 2 or not all(p.isidentifier() for p in parts):
        return "should be the dotted path of a class, as package.module.Class", ""
    if any(p.startswith("_") for p in parts):
        return "a private name may not be used", ""
    if not _inside(path, allow):
        trusted = ", ".join((OWN, *allow))
        cure = f"'security.allow=[{','.join((*allow, parts[0]))}]'"
        return f"package {parts[0]!r} is not trusted (trusted: {trusted})", cure
    return None


def there(path: str) -> bool:
    """Whether the package at the head of the dotted ``path`` is installed. Imports nothing."""
    package = path.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


def absent(key: str, path: str) -> Problem:
    return Problem(key, f"{path}: there is no such module")


def locate(path: str, allow: tuple[str, ...], base: type[T], *, key: str = "_target_") -> type[T]:
    """The class at ``path``: a subclass of ``base``, reached through and defined in a trusted package.

    Nothing is imported before the path itself has been accepted. Raises ``RequestError`` naming ``key``.
    """
    refused = refusal(path, allow)
    if refused is not None:
        raise _error(key, path, *refused)
    found = _find(path, allow, key)
    if not inspect.isclass(found) or not issubclass(found, base):
        kind = "class with a method __call__" if base.__name__ == "Callable" else f"{base.__name__} class"
        raise _error(key, path, f"is not a {kind}")
    if not _inside(f"{found.__module__}.{found.__qualname__}", allow):
        raise _error(key, path, f"the class is defined in {found.__module__}, which is not trusted", "")
    return found


def build(
    target: Target | Mapping[str, Any],
    allow: tuple[str, ...],
    base: type[T],
    *given: Any,
    key: str = "_target_",
) -> T:
    """An instance of the class that ``target`` names.

    ``given`` are passed first, then the target's own arguments. An argument that names a class itself is
    checked against the same ``base`` and built first.
    """
    path, arguments = (target.target, target.arguments) if isinstance(target, Target) else _split(target)
    reserved = [name for name in arguments if name.startswith("_") and name != "_args_"]
    if reserved:
        raise _error(key, path, f"{reserved[0]} is not supported; only _target_ and _args_ are")

    # build the arguments, then see whether the class takes them: its own code has not run yet
    cls = locate(path, allow, base, key=key)
    made = {k: _argument(v, allow, base, f"{_above(key)}{k}") for k, v in arguments.items()}
    positional = (*given, *made.pop("_args_", ()))
    _check_fit(cls, path, positional, made, key=key)
    return cls(*positional, **made)


def check_arguments(cls: type, target: Target, key: str) -> None:
    """Raises ``RequestError`` unless ``cls`` takes the arguments of ``target``; builds nothing."""
    named = target.arguments
    _check_fit(cls, target.target, tuple(named.pop("_args_", ())), named, key=key)


def _check_fit(cls: type, path: str, positional: tuple[Any, ...], named: Mapping[str, Any], key: str) -> None:
    try:
        inspect.signature(cls).bind(*positional, **named)
    except TypeError as error:
        raise _error(key, path, *_bad_arguments(str(error), cls, named, key)) from None


def _bad_arguments(why: str, cls: type, given: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Why ``cls`` does not take the arguments, and the cure where a name is misspelt."""
    text = f"its arguments do not fit: {why}"
    names = list(inspect.signature(cls).parameters)
    wrong = next((name for name in given if name not in names), "")
    if not wrong:
        return text, ""
    right = nearest(wrong, [n for n in names if n not in given])
    if right is None:
        return f"{text} (it takes {', '.join(names) or 'none'})", ""

    # a value can be pasted where it reads the same in an override
    value = given[wrong]
    plain = isinstance(value, int | float | bool) or (isinstance(value, str) and value.isidentifier())
    written = str(value).lower() if isinstance(value, bool) else value
    cure = f"~{_above(key)}{wrong} {_above(key)}{right}={written}" if plain else ""
    return f"{text}{did_you_mean(right)}", cure


def _argument(value: Any, allow: tuple[str, ...], base: type[T], key: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build(value, allow, base, key=f"{key}._target_")
    if isinstance(value, Mapping):
        return {k: _argument(v, allow, base, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_argument(v, allow, base, f"{key}.{i}") for i, v in enumerate(value)]
    return value


def _split(target: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(target["_target_"]), {k: v for k, v in target.items() if k != "_target_"}


def _find(path: str, allow: tuple[str, ...], key: str) -> object:
    """The object at ``path``, looked up from its longest importable part; never imports another package."""
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:n])
        if not _inside(module, allow):
            break
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(error.name + ".")):
                continue
            raise _error(key, path, f"importing {module} failed: {of_users(error)}") from None
        except (Exception, SystemExit) as error:  # whatever the user's file does
            raise _error(key, path, f"importing {module} failed: {of_users(error)}") from None

        # the rest are names inside of it
        for name in parts[n:]:
            if not hasattr(found, name):
                raise _absent(key, path, module, name=name, there=found)
            found = getattr(found, name)
        return found
    raise RequestError((absent(key, path),))


def _absent(key: str, path: str, module: str, *, name: str, there: object) -> RequestError:
    close = nearest(name, [n for n in dir(there) if not n.startswith("_")], 0.8)
    right = path.replace(f"{module}.{name}", f"{module}.{close}")
    cure = f"{key}={right}" if close else ""
    return _error(key, path, f"{module} has no {name!r}{did_you_mean(close)}", cure)


def _inside(path: str, allow: tuple[str, ...]) -> bool:
    return any(path == p or path.startswith(p + ".") for p in (OWN, *allow))


def _above(key: str) -> str:
    above = key.rpartition(".")[0]
    return f"{above}." if above else ""


def _error(key: str, path: str, why: str, cure: str = "") -> RequestError:
    return RequestError((Problem(key, f"{path}: {why}", cure),))
