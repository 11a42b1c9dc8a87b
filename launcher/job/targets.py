"""Finds, checks and calls what users name by ``_target_``: classes, and functions that return an instance."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

from launcher.errors import Problem, RequestError
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.user_class import Target
from launcher.user_errors import user_error

T = TypeVar("T")
OWN = "launcher"

OURS: Mapping[str, tuple[str, ...]] = {
    "Module": ("launcher.models.language_model.Attention", "launcher.models.language_model.SwiGLU"),
    "UserData": (),
    "Optimizer": (),
    "Callable": (),
    "object": (),
}
"""The launcher's own classes that ``_target_`` may name, by the required base; no others are allowed.

They only hold tensors: they open no file, start no process and take no class by name. docs/security.md has
the same table.
"""
BASES: Mapping[str, str] = {
    "model": "Module",
    "data": "UserData",
    "optim": "Optimizer",
    "loss": "Callable",
    "metrics": "Callable",
    "schedule": "Callable",
    "callbacks": "object",
    "logger.others": "object",
}
"""The base, a key of ``OURS``, that each setting requires of its ``_target_``."""
_ANYTHING = (object, type(None), inspect.Parameter.empty, list, tuple, dict, set, Any)


def refusal(path: str, allow: tuple[str, ...], ours: tuple[str, ...]) -> tuple[str, str] | None:
    """Returns why the dotted ``path`` is not allowed, and the cure; ``None`` if it is allowed.

    Imports nothing. ``ours``: the launcher's own classes that may be named; ``allow`` cannot add any.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(p.isidentifier() for p in parts):
        return "should be the dotted path of a class, such as package.module.Class", ""
    if any(p.startswith("_") for p in parts):
        return "a private name may not be used", ""
    if _own(path):
        return None if path in ours else (_not_ours(ours), "")
    if not _inside(path, allow):
        package = f"package {parts[0]!r} is not trusted"
        if parts[0] in sys.stdlib_module_names:  # it has no class for any setting, but functions that do harm
            return f"{package}: it is Python's own", ""
        if not is_installed(parts[0]):
            return f"{package}: there is no such package", ""
        why = f"{package} (trusted: {', '.join(allow) or 'none'})"
        return why, f"'security.allow=[{','.join((*allow, parts[0]))}]'"
    return None


def named(data: Any) -> Iterator[str]:
    """Yields every path that a ``_target_`` in plain data names, except the launcher's own."""
    if isinstance(data, Mapping):
        target = data.get("_target_")
        if isinstance(target, str) and not _own(target):
            yield target
    for value in (
        data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    ):
        yield from named(value)


def is_installed(path: str) -> bool:
    """Returns true if the top-level package of the dotted ``path`` is installed. Imports nothing."""
    package = path.partition(".")[0]
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def missing_module(key: str, path: str) -> Problem:
    module = path.partition(".")[0]
    return Problem(
        key, f"{path}: there is no module {module} on sys.path; start in the folder that contains it"
    )


def locate(path: str, allow: tuple[str, ...], base: type[T], *, key: str = "_target_") -> type[T]:
    """Returns the class at ``path``: a subclass of ``base``, in a trusted package and defined in one.

    A class of the launcher's own must be listed for ``base`` in ``OURS``. Nothing is imported before the path
    is accepted. Raises ``RequestError``, naming ``key``.
    """
    cls = _trusted(path, allow, base, key)
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise _other_kind(path, base, key)
    _check_home(path, cls, allow, base, key)
    return cls


def factory(path: str, allow: tuple[str, ...], base: type[T], *, key: str = "_target_") -> Callable[..., T]:
    """Like ``locate``, but ``path`` may also be a function or class method; callers must check its result.

    A class can only be constructed, whereas a function can do anything, so a trusted package is not enough:
    ``allow`` must name the function or its module.
    """
    function = _trusted(path, allow, base, key)
    if not _function(function):
        return locate(path, allow, base, key=key)
    if base.__name__ == "Callable":  # a schedule or loss would be called, not built
        raise _other_kind(path, base, key)
    if path not in allow:
        _check_home(path, function, allow, base, key)
        home = f"{function.__module__}.{function.__qualname__}"
        if not {home, function.__module__} & {*allow}:
            cure = f"'security.allow=[{','.join((*allow, path))}]'"
            raise _error(key, path, "is a function: security.allow has to name it, or its module", cure)
    made: Callable[..., T] = function
    return made


def build(
    target: Target | Mapping[str, Any],
    allow: tuple[str, ...],
    base: type[T],
    *first: Any,
    key: str = "_target_",
) -> T:
    """Constructs the class, or calls the function, that ``target`` names; returns an instance of ``base``.

    ``first`` are passed first, then the target's own arguments. An argument that is itself a ``_target_`` is
    constructed first, of any type. It may name a class of the launcher's own only if ``OURS`` lists it for
    the type of the argument, or for ``base`` if the argument has no type. Raises ``RequestError``.
    """
    instance: T = _built(target, allow, base, base, first, key)
    return instance


def _built(
    target: Target | Mapping[str, Any],
    allow: tuple[str, ...],
    kind: type[Any],
    base: type[Any],
    first: tuple[Any, ...],
    key: str,
) -> Any:
    """Constructs an instance of ``kind``. ``base``: the base that the setting requires."""
    path, arguments, make = _accepted(target, allow, kind, key)

    def nested(node: Mapping[str, Any], types: tuple[type, ...], name: str) -> Any:
        return _built(node, allow, _expected(node, types, base), base, (), name)

    # build the arguments, then check that they fit: the class's own code has not run yet
    made = _arguments(make, arguments, len(first), _above(key), nested)
    positional = (*first, *made.pop("_args_", ()))
    _check_fit(make, path, positional, made, key=key)
    instance = make(*positional, **made)
    if not isinstance(instance, kind):
        raise _error(key, path, f"returns {type(instance).__name__}, but {kind.__name__} is expected")
    return instance


def check(
    target: Target | Mapping[str, Any],
    allow: tuple[str, ...],
    base: type[Any],
    *,
    key: str = "_target_",
    kind: type[Any] | None = None,
) -> None:
    """Raises ``RequestError`` unless all names in ``target`` are allowed and their arguments fit.

    Constructs nothing. ``kind``: the required type, if ``base`` is that of an enclosing setting.
    """
    path, arguments, make = _accepted(target, allow, kind or base, key)

    def nested(node: Mapping[str, Any], types: tuple[type, ...], name: str) -> object:
        check(node, allow, base, key=name, kind=_expected(node, types, base))
        return node

    checked = _arguments(make, arguments, 0, _above(key), nested)
    _check_fit(make, path, tuple(checked.pop("_args_", ())), checked, key=key)


def _accepted(
    target: Target | Mapping[str, Any], allow: tuple[str, ...], kind: type[T], key: str
) -> tuple[str, dict[str, Any], Callable[..., T]]:
    """Returns the path and arguments of ``target``, and the class or function to call.

    Raises ``RequestError``.
    """
    path, arguments = (target.target, target.arguments) if isinstance(target, Target) else _split(target)
    reserved = [name for name in arguments if name.startswith("_") and name != "_args_"]
    if reserved:
        raise _error(key, path, f"{reserved[0]} is not supported; only _target_ and _args_ are")
    if not isinstance(arguments.get("_args_", []), list | tuple):
        raise _error(key, path, f"_args_ is {arguments['_args_']!r}; it should be a list")
    return path, arguments, factory(path, allow, kind, key=key)


Nested = Callable[[Mapping[str, Any], tuple[type, ...], str], Any]
"""Handles an argument that is itself a ``_target_``: takes its data, the expected types, and its key."""


def _arguments(
    make: Callable[..., Any], arguments: Mapping[str, Any], first: int, above: str, nested: Nested
) -> dict[str, Any]:
    """Returns ``arguments`` with each ``_target_`` replaced by the result of ``nested``.

    ``first``: the position of the first item of ``_args_``.
    """
    made = {
        name: _argument(value, _types(make, name), f"{above}{name}", nested)
        for name, value in arguments.items()
        if name != "_args_"
    }
    if "_args_" in arguments:
        made["_args_"] = [
            _argument(value, _types(make, first + i), f"{above}_args_.{i}", nested)
            for i, value in enumerate(arguments["_args_"])
        ]
    return made


def _argument(value: Any, types: tuple[type, ...], key: str, nested: Nested) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return nested(value, types, f"{key}._target_")
    if isinstance(value, Mapping):
        return {k: _argument(v, types, f"{key}.{k}", nested) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_argument(v, types, f"{key}.{i}", nested) for i, v in enumerate(value)]
    return value


def _expected(node: Mapping[str, Any], types: tuple[type, ...], base: type[Any]) -> type[Any]:
    """Returns the required type of an argument.

    It is any type for trusted packages, and the annotation for our own classes.
    """
    path = str(node["_target_"])
    if not _own(path):
        return object
    return next((t for t in types if path in _ours(t)), types[0] if types else base)


def _types(make: Callable[..., Any], which: str | int) -> tuple[type, ...]:
    """Returns the classes that the annotation of an argument names.

    ``which`` is its name or its position from 0.
    """
    try:
        parameters = inspect.signature(make, eval_str=True).parameters
    except Exception:  # some builtins have no signature, and some annotations cannot be evaluated
        return ()
    many = inspect.Parameter.VAR_KEYWORD if isinstance(which, str) else inspect.Parameter.VAR_POSITIONAL
    if isinstance(which, str):
        parameter = parameters.get(which)
    else:
        by_place = [p for p in parameters.values() if p.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
        parameter = by_place[which] if which < len(by_place) else None
    if parameter is None:
        parameter = next((p for p in parameters.values() if p.kind == many), None)
    return () if parameter is None else tuple(_classes(parameter.annotation))


def _classes(annotation: Any) -> Iterator[type]:
    """Yields the classes in ``annotation``; for a container, those of its items.

    >>> from collections.abc import Sequence
    >>> [*_classes(Sequence[int] | None)], [*_classes(Any)], [*_classes(dict)]
    ([<class 'int'>], [], [])
    """
    if get_origin(annotation) is Callable:
        yield Callable
    elif inner := get_args(annotation):
        for one in inner:
            yield from _classes(one)
    elif inspect.isclass(annotation) and annotation not in _ANYTHING:
        yield annotation


def _check_fit(
    make: Callable[..., Any], path: str, positional: tuple[Any, ...], named: Mapping[str, Any], key: str
) -> None:
    try:
        inspect.signature(make).bind(*positional, **named)
    except TypeError as error:
        raise _error(key, path, *_bad_arguments(str(error), make, named, key)) from None


def _bad_arguments(
    why: str, make: Callable[..., Any], arguments: Mapping[str, Any], key: str
) -> tuple[str, str]:
    """Returns why ``make`` does not take the arguments, and the cure if a name is misspelled."""
    text = f"its arguments do not fit: {why}"
    names = list(inspect.signature(make).parameters)
    wrong = next((name for name in arguments if name not in names), "")
    if not wrong:
        return text, ""
    right = nearest(wrong, [n for n in names if n not in arguments])
    if right is None:
        return f"{text} (it takes {', '.join(names) or 'none'})", ""

    # suggest a value only if it reads the same in an override
    value = arguments[wrong]
    plain = isinstance(value, int | float | bool) or (isinstance(value, str) and value.isidentifier())
    written = str(value).lower() if isinstance(value, bool) else value
    cure = f"~{_above(key)}{wrong} {_above(key)}{right}={written}" if plain else ""
    return f"{text}{did_you_mean(right)}", cure


def _split(target: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(target["_target_"]), {k: v for k, v in target.items() if k != "_target_"}


def _trusted(path: str, allow: tuple[str, ...], base: type, key: str) -> Any:
    """Returns the object at ``path``, once the path is accepted. Raises ``RequestError``."""
    refused = refusal(path, allow, _ours(base))
    if refused is not None:
        raise _error(key, path, *refused)
    return _find(path, allow, key)


def _function(value: Any) -> bool:
    """Returns true if ``value`` is a function, or a method that is bound to its class."""
    if inspect.ismethod(value):
        return inspect.isclass(value.__self__)
    return inspect.isfunction(value)


def _check_home(path: str, definition: Any, allow: tuple[str, ...], base: type, key: str) -> None:
    """Raises ``RequestError`` if the object at ``path`` is defined in a package that is not trusted."""
    home = f"{definition.__module__}.{definition.__qualname__}"
    if home in _ours(base) or (not _own(home) and _inside(home, allow)):
        return
    kind = "class" if inspect.isclass(definition) else "function"
    raise _error(key, path, f"the {kind} is defined in {definition.__module__}, which is not trusted")


def _ours(base: type) -> tuple[str, ...]:
    """Returns the launcher's own classes that are allowed where a ``base`` is required."""
    return tuple(path for cls in base.__mro__ for path in OURS.get(cls.__name__, ()))


def _not_ours(ours: tuple[str, ...]) -> str:
    some = f"only {' and '.join(ours)}" if ours else "none"
    return (
        f"of the launcher's own classes {some} may be named here; a class of yours may derive from this one"
    )


def _other_kind(path: str, base: type, key: str) -> RequestError:
    kinds = {
        "Callable": "class with a method __call__",
        "object": "class, nor a function",
        "UserData": "Source, nor a Dataset or IterableDataset of torch",
    }
    return _error(key, path, f"is not a {kinds.get(base.__name__, f'{base.__name__} class')}")


def _find(path: str, allow: tuple[str, ...], key: str) -> object:
    """Returns the object at ``path``.

    It is looked up from the longest part that can be imported. Imports only allowed packages.
    """
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:n])
        if not _own(module) and not _inside(module, allow):
            break
        try:
            value: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(error.name + ".")):
                continue
            raise _error(key, path, f"importing {module} failed: {user_error(error)}") from None
        except (Exception, SystemExit) as error:  # the user's file can raise anything
            raise _error(key, path, f"importing {module} failed: {user_error(error)}") from None

        # the remaining parts are attributes
        for name in parts[n:]:
            if not hasattr(value, name):
                raise _absent(key, path, module, name=name, there=value)
            value = getattr(value, name)
        return value
    raise RequestError((missing_module(key, path),))


def _absent(key: str, path: str, module: str, *, name: str, there: object) -> RequestError:
    close = nearest(name, [n for n in dir(there) if not n.startswith("_")], 0.8)
    right = path.replace(f"{module}.{name}", f"{module}.{close}")
    cure = f"{key}={right}" if close else ""
    return _error(key, path, f"{module} has no {name!r}{did_you_mean(close)}", cure)


def _own(path: str) -> bool:
    return _inside(path, (OWN,))


def _inside(path: str, allow: tuple[str, ...]) -> bool:
    return any(path == p or path.startswith(p + ".") for p in allow)


def _above(key: str) -> str:
    above = key.rpartition(".")[0]
    return f"{above}." if above else ""


def _error(key: str, path: str, why: str, cure: str = "") -> RequestError:
    return RequestError((Problem(key, f"{path}: {why}", cure),))
